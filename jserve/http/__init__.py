"""OpenAI-compatible HTTP beside gRPC: another way to spell the requests of the same server.  `front.http_front` runs it."""
