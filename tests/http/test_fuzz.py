"""Random bodies against a server over the real validator: never a 5xx, never a hang, nothing left behind."""

import asyncio
import json
import random

import pytest

from jserve.request import Code, FinishReason, GenerateRequest, GenerateUpdate, OutputDelta, Usage
from jserve.sampling.limits import ModelLimits
from jserve.sampling.validate import resolve, validate_request
from tests.support.fake_engine import FakeEngine
from tests.support.http_server import Answer, ask, http_serving

VALUES = [None, True, False, 0, 1, -1, 2, 16, 10**30, -(2**63), 0.5, -0.0, 1e308, "", "x", "é\\u0000", "auto", [],
          ["a"],
          [1, 2], [[1], [2]], [[]], [None], {}, {"a": 1}, {"1": 1}, {"type": "json_object"}, {"include_usage": True},
          [{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": 1, "content": None}], "\\ud800"]
NAMES = ["prompt", "messages", "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "n", "stop",
         "seed",
         "logprobs", "top_logprobs", "echo", "logit_bias", "response_format", "tools", "tool_choice", "user", "suffix",
         "best_of", "presence_penalty", "top_k", "min_p", "request_id", "priority", "cache_salt", "store", "unknown",
         "prompt_logprobs", "stop_token_ids", "min_tokens", "bad_words", "max_completion_tokens", "early_stopping",
         "choice", "allowed_token_ids", "metadata", "prompt_cache_key", "return_token_ids", "parallel_tool_calls"]


class ValidatingEngine(FakeEngine):
    """Refuses what the real engine's validator refuses."""

    limits = ModelLimits(context_length=64, vocab_size=257, eos_token_ids=(1,), max_prompt_characters=1000)

    async def generate(self, request: GenerateRequest):
        validate_request(request, self.limits)
        resolve(request.sampling_params, self.limits, 3)
        if request.sampling_params.max_tokens == 0:
            yield GenerateUpdate(
                request.request_id, [OutputDelta(0, finish_reason=FinishReason.LENGTH)], usage=Usage(1, 0, 0))
            return
        async for update in super().generate(request):
            yield update


def random_body(draw: random.Random, path: str) -> object:
    if draw.random() < 0.03:
        return draw.choice(VALUES)
    good = {"prompt": draw.choice(["x", [1, 2], ["a", "b"]])}
    if path == "/v1/chat/completions":
        good = {"messages": [{"role": "user", "content": "hi"}]}
    return {**good, **{draw.choice(NAMES): draw.choice(VALUES) for _ in range(draw.randrange(4))}}


@pytest.mark.parametrize("seed", range(3))
async def test_random_bodies_are_answered_or_refused(seed):
    draw, engine = random.Random(seed), ValidatingEngine(num_tokens=2)
    paths = ["/v1/completions"] * 4 + ["/v1/chat/completions"] * 4 + ["/tokenize", "/detokenize", "/v1/embeddings"]
    async with http_serving(engine) as (server, _):

        async def one() -> tuple[str, object, Answer]:
            path = draw.choice(paths)
            body = random_body(draw, path)
            data = json.dumps(body).encode()
            if draw.random() < 0.05:
                data = bytes(draw.randrange(256) for _ in range(draw.randrange(40)))
            return path, body, await ask(server, "POST", path, data)

        answers = [answer for _ in range(20) for answer in await asyncio.gather(*(one() for _ in range(20)))]
        assert not server.state.calls and not engine.running
    for path, body, answer in answers:
        assert answer.status in {200, 400, 404, 409}, (path, body, answer)
        if answer.status != 200:
            assert answer.error["message"] and answer.error["code"] != Code.INTERNAL.value.lower()
    assert sum(answer.status == 200 for _, _, answer in answers) > 20
