"""OpenAI-compatible HTTP beside gRPC: another way to spell requests to the same server.  `front.http_front` runs it."""
