"""Score and Embed over gRPC against what HF transformers computes of the same checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from jserve.proto_gen import inference_pb2 as pb
from jserve.proto_gen import inference_pb2_grpc
from tests.support.engines import running_engine
from tests.support.grpc_server import serving
from tests.support.tiny_models import transformers_llama, transformers_logits
from tests.support.tokenizer_folders import tiny_byte_level_tokenizer

pytest.importorskip("transformers")

PROMPT, CONTINUATIONS = "A quick sum: 2+2=", ["4", "5 or so", "$%&"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def theirs(folder):
    """transformers' model."""
    model = transformers_llama(folder)
    tiny_byte_level_tokenizer(folder)
    return model


@pytest.fixture(scope="module")
def engine(folder, theirs):
    with running_engine(folder) as engine:
        yield engine


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


async def test_scores_are_log_likelihoods(engine, theirs):
    async with serving(engine) as (_, client):
        score = inference_pb2_grpc.InferenceStub(client._channel).Score
        answer = await score(pb.ScoreRequest(prompt=PROMPT, continuations=CONTINUATIONS))
    start = len(engine.tokenizer.encode(PROMPT, add_special=True))
    for continuation, scored in zip(CONTINUATIONS, answer.scores):
        ids = engine.tokenizer.encode(PROMPT + continuation, add_special=True)
        rows = log_softmax(transformers_logits(theirs, ids))[start - 1 : -1]
        wanted = rows[np.arange(len(rows)), ids[start:]]
        assert list(scored.token_ids) == ids[start:] and scored.is_greedy == (rows.argmax(1).tolist() == ids[start:])
        np.testing.assert_allclose(scored.token_logprobs, wanted, atol=1e-4)
        assert scored.logprob == pytest.approx(wanted.sum(), abs=1e-3)


@pytest.mark.parametrize("normalize", [False, True])
async def test_embeddings_are_pooled_last_hidden_states(engine, theirs, normalize):
    import torch

    ids = [(7 * i) % 96 for i in range(50)]  # more than one chunk
    with torch.no_grad():
        hidden = theirs.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    async with serving(engine) as (_, client):
        embed = inference_pb2_grpc.InferenceStub(client._channel).Embed
        for pooling, wanted in ((pb.LAST, hidden[-1]), (pb.MEAN, hidden.mean(0))):
            answer = await embed(pb.EmbedRequest(prompt_token_ids=ids, pooling=pooling, normalize=normalize))
            wanted = wanted / np.linalg.norm(wanted) if normalize else wanted
            np.testing.assert_allclose(answer.embedding, wanted, rtol=1e-3, atol=1e-4)
