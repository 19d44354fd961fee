"""Jump-ahead: tokens that a grammar forces come as one chunk, and every answer is the one that it is without."""

from __future__ import annotations

import json
import random

import pytest

from jserve.request import FinishReason
from tests.support.arrivals import force_preemptions
from tests.support.engines import answers, request, running_engine, wait_idle
from tests.support.json_schemas import random_schema
from tests.support.tiny_models import random_gguf

PROMPT = [(7 * i) % 500 for i in range(20)]
WORDS = json.dumps({
    "type": "object", "properties": {"first_name": {"maxLength": 4, "type": "string"}, "is_available": {"type": "boolean"}},
    "required": ["first_name", "is_available"], "additionalProperties": False,
})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf", context_length=1024)


@pytest.fixture(scope="module", params=["overlap", "no overlap, few blocks, small chunks"])
def settings(request):
    if request.param == "overlap":
        return dict(kv={"num_blocks": 400, "memory_bytes": None, "block_size": 16}, scheduler={"max_num_seqs": 8})
    return dict(
        kv={"num_blocks": 60, "memory_bytes": None, "block_size": 4},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 8, "overlap": False},
    )


@pytest.fixture(scope="module")
def pair(path, settings):
    """Two engines, alike but for jump-ahead."""
    off = settings | {"scheduler": settings["scheduler"] | {"jump_ahead": False}}
    with running_engine(path, **off) as plain, running_engine(path, **settings) as jumping:
        yield plain, jumping


def whole(update) -> list:
    return [(one.index, one.token_ids, one.text, one.finish_reason) for one in update.outputs] + [
        update.usage.completion_tokens
    ]


def requests(count: int) -> list:
    """Schemas, greedy and sampled, of one output or several, some that cannot jump, and plain neighbours."""
    made = []
    for seed in range(count):
        rng = random.Random(seed)
        params = dict(temperature=rng.choice([0.0, 1.0]), seed=seed)
        schema = WORDS if seed % 2 else json.dumps(random_schema(rng))
        kind = [{"n": 2}, {"logprobs": 1}, {"presence_penalty": 0.5}, {"logit_bias": {40: 2.0}}, {}, {}][seed % 6]
        if seed % 5 == 4:
            made.append(request(PROMPT, 20, ignore_eos=True, **params))
        else:
            made.append(request(PROMPT[seed % 3 :], rng.choice([7, 23, 80, 150]), json_schema=schema, **params, **kind))
    return made


@pytest.mark.parametrize("preempts", [False, True])
def test_answers_are_the_same_with_and_without(pair, preempts):
    plain, jumping = pair
    expected = [whole(update) for update in answers(plain, requests(24))]
    check = jumping._loop.on_step
    try:
        if preempts:
            force_preemptions(jumping)
        got = [whole(update) for update in answers(jumping, requests(24))]
        wait_idle(jumping)
    finally:
        jumping._loop.on_step = check
    assert got == expected


def num_steps(engine, asked) -> tuple[int, int]:
    """(steps, tokens) of a request alone."""
    before = engine._loop.totals.num_steps, engine._loop.totals.generated_tokens
    [update] = answers(engine, [asked])
    wait_idle(engine)
    totals = engine._loop.totals
    assert update.outputs[0].finish_reason is FinishReason.STOP
    return totals.num_steps - before[0], update.usage.completion_tokens


def test_it_takes_fewer_steps_than_tokens(pair):
    plain, jumping = pair
    asked = request(PROMPT, 80, regex="The answer is most definitely (yes indeed|no way)!")
    steps, tokens = num_steps(plain, asked)
    assert steps >= tokens
    assert num_steps(jumping, asked) < (tokens * 0.7, tokens)


def test_a_request_that_asks_for_logprobs_gets_one_for_each_token(pair):
    _, jumping = pair
    [with_logprobs, without] = answers(
        jumping, [request(PROMPT, 80, regex="It is so.", logprobs=logprobs) for logprobs in (0, None)]
    )
    [scored], [jumped] = with_logprobs.outputs, without.outputs
    assert len(scored.logprobs) == len(scored.token_ids) and scored.token_ids == jumped.token_ids
    assert scored.cumulative_logprob == pytest.approx(sum(one.chosen.logprob for one in scored.logprobs), abs=1e-3)
    assert jumped.cumulative_logprob is None  # of tokens that nobody scored
