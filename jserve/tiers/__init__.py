"""Where the bytes of lower tiers of the prefix cache lie. What is kept, and when it is copied, jserve.kv decides."""
