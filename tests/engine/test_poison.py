"""Freed blocks are overwritten: nothing that is served depends on one, and a block read after its end shows."""

import numpy as np
import pytest

from jserve.engine.build import build_engine
from tests.engine.test_parallel_sampling import PROMPT, engine_of, outputs
from tests.support.engines import answers, config_for, request
from tests.support.tiny_models import random_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


def work():
    shared = PROMPT[:24]
    return [request(shared + [at], 10, n=1 + at % 2, temperature=1.0, seed=at, ignore_eos=True) for at in range(6)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_freed_blocks(path, dtype):
    got = []
    for poisons in (False, True):
        with engine_of(path, kv={"poison_freed": poisons, "dtype": dtype, "prefix_cache": False}) as engine:
            got.append([outputs(one) for one in answers(engine, work()) + answers(engine, work())])
            loads = engine.loads()
            assert loads.compiles_after_ready == 0
    assert got[0] == got[1]


def test_a_planted_stale_read_changes_the_output(path):
    """The first block of a running sequence is given back too early, and nobody takes it: without poison all is well."""
    got = {}
    for poisons in (False, True):
        config = config_for(path, kv={"poison_freed": poisons, "prefix_cache": False})
        engine = build_engine(config)
        try:
            [clean] = answers(engine, [request(PROMPT, 12, ignore_eos=True)])
            planted = []

            def free_too_early(scheduler):
                running = scheduler.running()
                if running and not planted and running[0].num_output == 3:
                    memory = scheduler.blocks._memory
                    block = int(memory.tables[0][running[0].slot, 0])
                    memory.pools[0].release(np.array([block], np.int32))
                    planted.append(block)
                    pool = memory.pools[0]  # at the bottom of the stack: not handed out again
                    pool._free[: pool._num_free] = np.roll(pool._free[: pool._num_free], 1)

            engine._loop.on_step = free_too_early
            [stale] = answers(engine, [request(PROMPT, 12, ignore_eos=True)])
            assert planted
            got[poisons] = outputs(stale) == outputs(clean)
        finally:
            engine.stop()
    assert got == {False: True, True: False}
