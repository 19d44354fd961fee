"""Score on the real model: the log-probabilities that generation itself gives, and those of another program."""

from __future__ import annotations

import json

import grpc
import pytest

from jserve.proto_gen import inference_pb2 as pb
from jserve.proto_gen import inference_pb2_grpc
from tests.support.conformance import PROMPT, alone, ids, only

pytestmark = [pytest.mark.xdist_group("conformance"), alone]


@pytest.fixture
def score(client):
    return inference_pb2_grpc.InferenceStub(client._channel).Score


def test_scores_are_those_of_generation(score, ask, client):
    generated = ask(max_tokens=2, logprobs=0)
    answer = score(pb.ScoreRequest(prompt=PROMPT, continuations=[only(generated).text, " Berlin", " purple cats"]))
    greedy, berlin, cats = answer.scores
    assert list(greedy.token_ids) == ids(generated) and greedy.is_greedy and not berlin.is_greedy
    assert greedy.logprob == pytest.approx(only(generated).cumulative_logprob, abs=1e-3)
    assert cats.logprob == pytest.approx(sum(cats.token_logprobs), abs=1e-4) and cats.logprob < berlin.logprob < greedy.logprob
    with_ids = pb.ScoreRequest(prompt_token_ids=client.tokenize(PROMPT), continuations=[" Berlin"])
    assert score(with_ids).scores[0].logprob == pytest.approx(berlin.logprob, abs=1e-4)


def test_scores_are_those_of_another_program(score, client, surrounding, repository_root):
    """What tests/golden has of each token of a text, as the score of its second half."""
    cases = json.loads((repository_root / "tests/golden/greedy.json").read_text())
    texts = [case for case in cases if case["kind"] == "text" and case["source"].isascii() and len(case["source"]) < 80]
    for case in texts[:4]:
        token_ids, text = case["prompt_token_ids"], case["source"]
        cut = len(token_ids) // 2
        half = client.detokenize(token_ids[:cut])
        assert text.startswith(half)
        [scored] = score(pb.ScoreRequest(prompt=half, continuations=[text[len(half) :]])).scores
        assert list(scored.token_ids) == token_ids[cut:]
        assert list(scored.token_logprobs) == pytest.approx(case["prompt_logprobs"][cut:], abs=2e-3)


@pytest.mark.parametrize("asked, field", [
    (dict(prompt=PROMPT), "continuations"), (dict(continuations=["x"]), "prompt"),
    (dict(prompt=PROMPT, continuations=["x", ""]), "continuations[1]"),
    (dict(prompt="", continuations=["x"]), "prompt"),
    (dict(prompt=PROMPT, continuations=["x", "y " * 9000]), "continuations[1] = '9006 tokens': exceeds"),
    (dict(prompt="y " * 10**6, continuations=["x"] * 1000), "prompt = 'at least"),
    (dict(prompt_token_ids=[49152], continuations=["x"]), "prompt_token_ids[0] = 49152"),
], ids=range(7))
def test_what_cannot_be_scored_is_refused_by_name(score, surrounding, asked, field):
    with pytest.raises(grpc.RpcError) as caught:
        score(pb.ScoreRequest(**asked))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in caught.value.details()
