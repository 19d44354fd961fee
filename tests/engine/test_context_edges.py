"""The edge of the context, and refusals among running requests: exact counts, the numbers in the message, nobody hurt."""

from __future__ import annotations

import asyncio

import pytest

from jserve.request import Code, FinishReason, GenerateRequest, RequestError, SamplingParams
from jserve.weights.load import load_model
from tests.support.engines import answers, request, run, running_engine, token_ids
from tests.support.tiny_models import naive_generate, random_gguf

LONGEST = 64
PROMPT = [(7 * i) % 500 for i in range(LONGEST + 100)]
NAN, INF = float("nan"), float("inf")

REFUSED = [
    (dict(prompt=""), {}, "prompt"),
    (dict(prompt_token_ids=[]), {}, "prompt_token_ids"),
    (dict(messages=[]), {}, "messages"),
    (dict(prompt_token_ids=[5, 512]), {}, "prompt_token_ids[1]"),
    (dict(prompt_token_ids=[5, -1]), {}, "prompt_token_ids[1]"),
    (dict(prompt_token_ids=[2**40]), {}, "prompt_token_ids[0]"),
    (dict(prompt="a"), dict(temperature=NAN), "temperature"),
    (dict(prompt="a"), dict(top_p=INF), "top_p"),
    (dict(prompt="a"), dict(presence_penalty=1e308), "presence_penalty"),
    (dict(prompt="a"), dict(logit_bias={512: 5.0}), "logit_bias key"),
    (dict(prompt="a"), dict(logit_bias={0: NAN}), "logit_bias[0]"),
    (dict(prompt="a"), dict(stop_token_ids=[512], min_tokens=5), "stop_token_ids[0]"),
    (dict(prompt="a"), dict(allowed_token_ids=[-1]), "allowed_token_ids[0]"),
    (dict(prompt="a"), dict(stop=["x"] * 10**5), "stop"),
    (dict(prompt="a"), dict(n=10**6), "n"),
    (dict(prompt="a"), dict(prompt_logprobs=-1), "prompt_logprobs"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf", context_length=LONGEST)


@pytest.fixture(scope="module")
def engine(path):
    with running_engine(path) as engine:
        yield engine


def refusal(engine, asked: GenerateRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        run(engine.generate_all(asked))
    assert caught.value.code is Code.INVALID_ARGUMENT
    return caught.value


def test_one_place_left_is_one_token_and_none_is_a_refusal_with_the_numbers(engine, path):
    model = load_model(path, "float32")
    want = naive_generate(model.params, model.config, PROMPT[: LONGEST - 1], 1)
    for asked in (1, 2, None):
        [update] = answers(engine, [request(PROMPT[: LONGEST - 1], asked, ignore_eos=True)])
        assert token_ids(update) == want and update.outputs[0].finish_reason is FinishReason.LENGTH
        for length in (LONGEST, LONGEST + 100):
            error = refusal(engine, request(PROMPT[:length], asked))
            numbers = [str(length), str(LONGEST), "unset" if asked is None else str(asked)]
            assert error.field == "prompt_token_ids" and all(number in error.message for number in numbers)
    [scored] = answers(engine, [request(PROMPT[:LONGEST], 0, prompt_logprobs=1)])
    assert len(scored.prompt_logprobs) == LONGEST and scored.usage.completion_tokens == 0


def test_nothing_is_cut_unless_asked_and_an_output_without_end_stops_at_the_context(engine):
    [update] = answers(engine, [request(PROMPT[:20], None, ignore_eos=True)])
    assert update.usage.prompt_tokens == 20 and update.usage.completion_tokens == LONGEST - 20
    assert update.outputs[0].finish_reason is FinishReason.LENGTH
    cut, last = answers(engine, [
        request(PROMPT, 4, truncate_prompt_tokens=10, ignore_eos=True), request(PROMPT[-10:], 4, ignore_eos=True),
    ])
    assert cut.usage.prompt_tokens == 10 and token_ids(cut) == token_ids(last)


def test_what_is_refused_changes_nothing_for_those_that_run(engine):
    good = [
        request(PROMPT[at : at + 9], 12, temperature=float(at % 2), seed=at, ignore_eos=True)
        for at in range(len(REFUSED))
    ]
    alone = [token_ids(answers(engine, [one])[0]) for one in good[:4]]

    async def together():
        bad = [GenerateRequest(**prompt, sampling_params=SamplingParams(**params)) for prompt, params, _ in REFUSED]
        mixed = [engine.generate_all(one) for pair in zip(good, bad) for one in pair]
        return await asyncio.gather(*mixed, return_exceptions=True)

    results = run(together())
    assert [token_ids(update) for update in results[:8:2]] == alone
    for error, (_, params, field) in zip(results[1::2], REFUSED):
        assert error.code is Code.INVALID_ARGUMENT
        assert error.field == (f"sampling_params.{field}" if params else field)
        assert len(error.message.encode()) < 500
