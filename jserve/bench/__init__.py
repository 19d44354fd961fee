"""Measuring: loads, one report schema, and the modes of `jserve bench`."""
