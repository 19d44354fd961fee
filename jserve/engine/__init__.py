"""Wires the pieces together and runs them: build (wires), loop (runs), outputs (applies), async_engine (the front door)."""
