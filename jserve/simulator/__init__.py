"""Whole deployments simulated: the real scheduler, block manager and outputs over a device that only takes time.

`workload` says who comes when, `engine` and `baselines` are systems that decide steps, `clock` runs them, `timeline`
draws what happened, `capacity` finds the load that a latency target allows.
"""
