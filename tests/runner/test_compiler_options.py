"""Compiler options come and go with jax's versions; a start must not depend on them."""

import jax

from jserve.runner.compiler import compile_all, understands


def test_an_option_that_this_compiler_does_not_know_is_left_out():
    assert not understands("xla_cpu_no_such_option", True)
    assert understands("xla_backend_optimization_level", 2)

    jobs = {"double": lambda: jax.jit(lambda x: 2 * x).lower(jax.ShapeDtypeStruct((), "int32"))}
    options = {"xla_cpu_no_such_option": True, "xla_backend_optimization_level": 2}
    compiled = compile_all(jobs, 1, lambda done, total: None, options=lambda program: options)
    assert compiled["double"](jax.numpy.int32(21)) == 42
