"""Compilers for devices that are not here.  The environment is set before jax starts a backend."""

from pallas_kernels import targets

targets.configure_environment()
