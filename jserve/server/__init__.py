"""The gRPC server over an engine, and its client.  `serve.serve` runs it; `client` calls it."""
