"""Kernels for CPUs that XLA's own code does not serve well, compiled at the start by LLVM and called by XLA."""
