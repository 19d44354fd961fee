"""Whole forward steps of real models through the TPU compiler: KV in place, no copy of weights, temporaries bounded."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jserve.models import llama
from jserve.models.config import ModelConfig, from_hf
from jserve.models.inputs import AttentionPlan, ForwardInputs
from pallas_kernels import targets
from pallas_kernels.paged_attention import RaggedBatch, layout

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not targets.has_tpu_compiler(), reason="needs libtpu: pip install jax[tpu]"),
]

MIB, GIB = 1 << 20, 1 << 30
SMOLLM2 = from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
)
LLAMA3_8B = from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
)


def compile_forward(
    target: str, config: ModelConfig, num_tokens: int, num_rows: int, num_blocks: int, decode_only: bool
):
    """Forward, logits of one row a sequence, greedy ids; the pool donated."""
    pool_layout = layout("tpu", config.num_kv_heads, config.head_dim, 64, "bfloat16")
    plan = AttentionPlan("mosaic_tpu", (pool_layout,), decode_only)

    def step(params, pool, inputs, sampled_rows):
        hidden, (pool,) = llama.forward(params, config, (pool,), inputs, plan)
        logits = llama.logits(params, config, hidden[sampled_rows])
        return jnp.argmax(logits, -1), pool

    i32 = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), llama.param_specs(config, "bfloat16")
    )
    batch = RaggedBatch(i32(num_rows, 128), i32(num_rows), i32(num_rows + 1), i32())
    pool = jax.ShapeDtypeStruct(pool_layout.shape(config.num_layers, num_blocks), pool_layout.storage_dtype)
    compiled = targets.compile_for(
        target,
        step,
        params,
        pool,
        ForwardInputs(i32(num_tokens), i32(num_tokens), (batch,)),
        i32(num_rows),
        donate=(1,),
        options=targets.step_compiler_options(target),
    )
    return compiled, params, pool


def assert_in_place(compiled, params, pool, largest_temporaries: int):
    memory = compiled.memory_analysis()
    num_bytes = lambda leaf: leaf.size * leaf.dtype.itemsize
    assert memory.alias_size_in_bytes == num_bytes(pool)
    assert memory.temp_size_in_bytes < largest_temporaries
    expected = num_bytes(pool) + sum(map(num_bytes, jax.tree.leaves(params)))
    assert expected <= memory.argument_size_in_bytes < expected * 1.05
    text = compiled.as_text()
    for leaf in [pool, *(leaf for leaf in jax.tree.leaves(params.layers) if leaf.ndim == 3)]:
        dimensions = ",".join(map(str, leaf.shape))
        assert not re.search(rf"\[{dimensions}\]\S* copy\(", text), f"a copy of [{dimensions}]"


# Bucket: tokens, rows, decode only, temporaries.  Large buckets hold the ffn's activations and 64 rows of logits.
SMALLEST = (8, 8, True, 32 * MIB)
LARGEST = (2048, 64, False, 512 * MIB)


@pytest.mark.parametrize("target", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("bucket", [SMALLEST, LARGEST], ids=["smallest", "largest"])
def test_smollm2(target, bucket):
    num_tokens, num_rows, decode_only, temporaries = bucket
    # XLA keeps the tied [49152, 576] table with tokens along lanes (576 would be padded) and turns it for the lookup.
    temporaries += 64 * MIB
    compiled, params, pool = compile_forward(target, SMOLLM2, num_tokens, num_rows, 1024, decode_only)
    assert compiled.as_text().count("tpu_custom_call") == (1 if decode_only else 3), "kernels of one scanned layer"
    assert_in_place(compiled, params, pool, temporaries)


@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
@pytest.mark.parametrize("bucket", [SMALLEST, LARGEST], ids=["smallest", "largest"])
def test_llama3_8b(target, bucket):
    num_tokens, num_rows, decode_only, temporaries = bucket
    compiled, params, pool = compile_forward(target, LLAMA3_8B, num_tokens, num_rows, 512, decode_only)
    assert_in_place(compiled, params, pool, temporaries)


def test_llama3_8b_does_not_fit_one_v5e():
    """16.06 GB of weights on 16 GB: what memory planning must refuse before this."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)hbm"):
        compile_forward("v5e", LLAMA3_8B, 8, 8, 512, True)
