"""SmolLM2's beams against those of HF transformers (tests/golden/beam.json): the same order, scores within 2e-3.

Beams whose scores are closer than 1e-3 may change places, in two right float32 programs too.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from jserve.request import EarlyStopping, GenerateRequest, SamplingParams
from tests.support.engines import run, running_engine
from tests.support.smollm2 import smollm2_gguf

pytestmark = [pytest.mark.xdist_group("smollm2"), pytest.mark.slow]

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "beam.json").read_text())
RULES = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.FIRST, "never": EarlyStopping.NEVER}
MARGIN, SCORE_ERROR = 1e-3, 2e-3


def request(record: dict) -> GenerateRequest:
    width = record["num_beams"]
    params = SamplingParams(
        beam_width=width, n=width, max_tokens=record["max_tokens"], length_penalty=record["length_penalty"],
        early_stopping=RULES[record["early_stopping"]],
    )
    return GenerateRequest(prompt_token_ids=record["prompt_token_ids"], sampling_params=params)


def check(record: dict, update) -> None:
    got = []
    for delta in update.outputs:
        score = delta.cumulative_logprob / len(delta.token_ids) ** record["length_penalty"]
        got.append((delta.token_ids, score, delta.finish_reason.value))
    wanted = [(beam["token_ids"], beam["score"], beam["finish"]) for beam in record["beams"]]
    assert [score for _, score, _ in got] == pytest.approx([score for _, score, _ in wanted], abs=SCORE_ERROR)
    for place, (one, other) in enumerate(zip(got, wanted)):
        neighbours = [abs(other[1] - wanted[near][1]) for near in (place - 1, place + 1) if 0 <= near < len(wanted)]
        if min(neighbours) > MARGIN:
            assert (one[0], one[2]) == (other[0], other[2])


# Each rule, length penalty, and way to end; all thirty are the soak's.
SOME = [GOLDEN[number] for number in (3, 9, 15, 16, 17, 18, 26, 29)]


@pytest.mark.parametrize("records", [SOME, pytest.param(GOLDEN, marks=pytest.mark.soak)], ids=["some", "all"])
def test_the_beams_of_transformers_in_their_order(records):
    # The pool is small enough that the searches get in each other's way.
    sections = dict(
        kv={"num_blocks": 24, "memory_bytes": None, "block_size": 32},
        scheduler={"max_num_batched_tokens": 64, "max_num_seqs": 16},
    )
    with running_engine(smollm2_gguf(), **sections) as engine:
        updates = run(all_answers(engine, records), timeout_s=280)
    for record, update in zip(records, updates):
        check(record, update)


async def all_answers(engine, records) -> list:
    return await asyncio.gather(*(engine.generate_all(request(record)) for record in records))
