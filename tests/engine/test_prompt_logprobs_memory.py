"""prompt_logprobs=20 of 4,096 tokens and 128,256 ids: the process grows by less than docs/sampling.md says."""

from __future__ import annotations

import pytest

from jserve.runner.compile_plan import SCORED_ROWS
from tests.support.engines import answers, request, running_engine
from tests.support.tiny_models import random_gguf

NUM_TOKENS, VOCAB_SIZE = 4096, 128_256
BOUND = 3 * SCORED_ROWS * VOCAB_SIZE * 4 + 10_000 * NUM_TOKENS
"""Three blocks of logits on the device, and the answer: 140 MB where the logits of all positions are 2.1 GB."""


def memory(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_the_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError as error:
        pytest.skip(f"the peak of a process cannot be measured here: {error}")


def test_a_long_prompt_of_a_large_vocabulary_stays_under_the_bound(tmp_path):
    forget_the_peak()
    path = random_gguf(tmp_path / "model.gguf", context_length=NUM_TOKENS + 8, num_rows=VOCAB_SIZE)
    with running_engine(path, scheduler={"max_num_batched_tokens": 512, "max_num_seqs": 2}) as engine:
        prompt = [(7 * i) % 500 for i in range(NUM_TOKENS)]
        answers(engine, [request(prompt, 1)])
        forget_the_peak()
        before = memory("VmRSS")
        [update] = answers(engine, [request(prompt, 1, prompt_logprobs=20)])
        grown = memory("VmHWM") - before
    assert len(update.prompt_logprobs) == NUM_TOKENS and len(update.prompt_logprobs[1].top) in (20, 21)
    assert 10_000_000 < grown < BOUND
