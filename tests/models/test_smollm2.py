"""SmolLM2's real GGUF against reference log-probabilities of another program (tests/golden/greedy.json)."""

import json

import jax
import numpy as np
import pytest

from jserve.weights.load import load_model
from tests.support.smollm2 import smollm2_gguf
from tests.support.tiny_models import full_logits, script_gguf

PADDED = 96
"""One length, so that the forward compiles once; causal attention ignores what follows."""


@pytest.fixture(scope="module")
def smollm2():
    return load_model(smollm2_gguf(), "float32")


@pytest.fixture(scope="module")
def cases(repository_root):
    cases = json.loads((repository_root / "tests/golden/greedy.json").read_text())
    short = [case for case in cases if len(case["prompt_token_ids"]) + len(case["generated_token_ids"]) <= PADDED]
    chat = [case for case in short if case["kind"] == "chat"]
    return [*short[:4], *chat[:2]]


def test_logprobs_of_prompts_and_outputs_agree_with_the_reference(smollm2, cases):
    assert len(cases) == 6
    for case in cases:
        ids = case["prompt_token_ids"] + case["generated_token_ids"]
        logits = full_logits(smollm2.params, smollm2.config, ids + [0] * (PADDED - len(ids)))
        logprobs = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(ids) - 1), ids[1:]]
        expected = case["prompt_logprobs"][1:] + [step["logprob"] for step in case["steps"]]
        np.testing.assert_allclose(logprobs, expected, atol=2e-3)


def test_what_the_gguf_says_about_the_model(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rope.theta, config.context_length, config.vocab_size, config.tied) == (1e5, 8192, 49152, True)
    assert (config.bos_token_id, smollm2.eos_token_ids) == (1, (2,))
    assert len(smollm2.tokenizer_source["tokenizer.ggml.tokens"]) == 49152


def test_the_script_model_says_its_chain_by_a_wide_margin(tmp_path):
    """The fixture that other tests put words into the engine's mouth with."""
    chain = np.random.default_rng(3).choice(np.arange(17, 49152), 60, replace=False).tolist()
    model = load_model(script_gguf(tmp_path / "script.gguf", chain, smollm2_gguf(), eos=True), "float32")
    logits = full_logits(model.params, model.config, chain)
    assert logits.argmax(axis=1).tolist() == [*chain[1:], 2]
    best, second = np.sort(logits, axis=1)[:, [-1, -2]].T
    assert (best - second).min() > 40
