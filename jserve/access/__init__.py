"""Who may call: tokens, tenants, their limits, certificates.  Knows no transport; gRPC and HTTP both ask here."""
