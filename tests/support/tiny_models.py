"""Tiny checkpoints that tests make themselves, and the slow way to run them: the whole sequence, no cache reuse.

`transformers_llama` is the oracle's own checkpoint (needs torch); `script_gguf` and `random_gguf` need none and carry a
tokenizer: SCRIPT says what the test wants, RANDCTX depends on every token before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from jserve.models.config import ModelConfig
from jserve.models.inputs import AttentionPlan, ForwardInputs
from jserve.models.registry import model_code
from jserve.weights.gguf import read_gguf
from pallas_kernels.paged_attention import RaggedBatch, layout

# Running a model the slow way


@partial(jax.jit, static_argnums=(1, 3))
def _whole_sequence(params, config: ModelConfig, token_ids: jax.Array, implementation: str) -> tuple[jax.Array, jax.Array]:
    num_tokens, block_size = token_ids.shape[0], 32
    num_blocks = -(-num_tokens // block_size)
    pool_layout = layout("cpu", config.num_kv_heads, config.head_dim, block_size, "float32")
    batch = RaggedBatch(
        block_tables=jnp.arange(1, num_blocks + 1, dtype=jnp.int32)[None],
        kv_lens=jnp.array([num_tokens], jnp.int32),
        cu_q_lens=jnp.array([0, num_tokens], jnp.int32),
        num_decodes=jnp.int32(0),
    )
    groups = config.layer_groups
    inputs = ForwardInputs(token_ids, jnp.arange(num_tokens, dtype=jnp.int32), (batch,) * len(groups))
    pools = tuple(pool_layout.allocate(group.num_layers, num_blocks + 1) for group in groups)
    code = model_code(config)
    plan = AttentionPlan(implementation, (pool_layout,) * len(groups))
    hidden, _ = code.forward(params, config, pools, inputs, plan)
    return hidden, code.logits(params, config, hidden)


def full_logits(
    params: Any, config: ModelConfig, token_ids: Sequence[int], implementation: str = "reference"
) -> np.ndarray:
    """f32[T, V]: logits at every position of one sequence, computed in one step over a fresh pool."""
    return np.asarray(_whole_sequence(params, config, jnp.asarray(token_ids, jnp.int32), implementation)[1])


def full_hidden(params: Any, config: ModelConfig, token_ids: Sequence[int]) -> np.ndarray:
    """f32[T, D]: final hidden states of one sequence, computed the same way."""
    return np.asarray(_whole_sequence(params, config, jnp.asarray(token_ids, jnp.int32), "reference")[0])


def naive_generate(
    params: Any, config: ModelConfig, prompt: Sequence[int], num_tokens: int, padded_to: int | None = None
) -> list[int]:
    """Greedy continuation: the whole sequence again for each token, padded to one length so that it compiles once; with
    `padded_to` once for prompts of all lengths."""
    ids, length = list(prompt), padded_to or len(prompt) + num_tokens
    for _ in range(num_tokens):
        padded = ids + [0] * (length - len(ids))  # causal: what follows changes nothing before it
        ids.append(int(full_logits(params, config, padded)[len(ids) - 1].argmax()))
    return ids[len(prompt) :]


# HF folders, by transformers


def transformers_llama(folder: Path, *, seed: int = 0, max_shard_size: str | int | None = None, **overrides):
    """Saves a random `LlamaForCausalLM` in `folder` and returns it; biases and norms are random too."""
    return transformers_model(folder, "Llama", seed=seed, max_shard_size=max_shard_size, **overrides)


def transformers_model(
    folder: Path, name: str, *, seed: int = 0, max_shard_size: str | int | None = None, spread: float = 0.2, **overrides
):
    """Saves a random model of transformers' `{name}ForCausalLM` in `folder` and returns it."""
    import torch
    import transformers

    config_class = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    settings = dict(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
    )
    if name != "Llama":
        settings |= {"head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}
    mean_of_norms = 0.0 if name.startswith("Gemma") else 1.0
    torch.manual_seed(seed)
    with torch.no_grad():
        model = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**settings, **overrides})).eval()
        for parameter_name, parameter in model.named_parameters():
            mean = mean_of_norms if "norm" in parameter_name else 0.0
            parameter.copy_(torch.randn_like(parameter) * spread + mean)
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    return model


def transformers_logits(model, token_ids: Sequence[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0].float().numpy()


# GGUF files


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    encoding: str = "F32",
    context_length: int = 128,
    rope_theta: float = 10000.0,
    rope_divisors: np.ndarray | None = None,
    extra_fields: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Writes HF-named float32 tensors as llama.cpp's converter does: renamed, q and k rows reordered, matrices encoded.

    Returns the tensors as the encoding keeps them, under HF's names and in HF's order.
    """
    kind = gguf.GGMLQuantizationType[encoding]
    writer = gguf.GGUFWriter(path, "llama")
    d_ff, d_model = tensors["model.layers.0.mlp.gate_proj.weight"].shape
    writer.add_block_count(1 + max(int(name.split(".")[2]) for name in tensors if ".layers." in name))
    writer.add_context_length(context_length)
    writer.add_embedding_length(d_model)
    writer.add_feed_forward_length(d_ff)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (extra_fields or {}).items():
        _add_field(writer, key, value)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.astype(np.float32))
    kept = {}
    for name, tensor in tensors.items():
        rows = _llama_cpp_order(tensor, head_dim) if ".q_proj." in name or ".k_proj." in name else tensor
        if tensor.ndim == 1:
            kept[name] = tensor
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(rows, np.float32))
        else:
            kept[name] = gguf.dequantize(gguf.quantize(tensor, kind), kind).reshape(tensor.shape)
            writer.add_tensor(_gguf_name(name), gguf.quantize(np.ascontiguousarray(rows), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _llama_cpp_order(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """convert_hf_to_gguf's permute: the halves of each head are interleaved."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _gguf_name(name: str) -> str:
    for theirs, ours in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ):
        name = name.replace(theirs, ours)
    return name


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, list(value))


# SCRIPT: the next token is a function of the last one


def script_gguf(path: Path, chain: Sequence[int], tokenizer_from: Path, d_model: int = 128, eos: bool = False) -> Path:
    """A model that answers chain[i] with chain[i + 1], by a margin of tens, with the tokenizer of `tokenizer_from`.

    Attention and MLP add nothing to the hidden state, which so stays the last token's embedding a; the head's row for
    the wanted successor b is a.  Keys and values are computed and cached as ever.  No token may stand twice in the
    chain, for it has one successor; what follows its last token is arbitrary (with `eos`: EOS), as after any other.
    """
    fields = _tokenizer_fields(tokenizer_from)
    chain = [*chain, fields["tokenizer.ggml.eos_token_id"]] if eos else list(chain)
    assert len(set(chain)) == len(chain), "a token has one successor"
    vocab_size, num_heads, head_dim = len(fields["tokenizer.ggml.tokens"]), d_model // 64, 64
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((vocab_size, d_model), np.float32)
    head = np.zeros_like(embedding)
    head[chain[1:]] = embedding[chain[:-1]]
    tensors = _random_layers(rng, 1, d_model, 2 * d_model, num_heads, 1, head_dim)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"][:] = 0
    tensors |= {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(d_model, np.float32),
        "lm_head.weight": head,
    }
    write_gguf(
        path, tensors, num_heads=num_heads, num_kv_heads=1, head_dim=head_dim,
        encoding="F16", context_length=2048, extra_fields=fields,
    )  # fmt: skip
    return path


def _tokenizer_fields(path: Path) -> dict[str, Any]:
    return {key: value for key, value in read_gguf(path).fields.items() if key.startswith("tokenizer.")}


# RANDCTX: random, and every token counts


def random_gguf(
    path: Path,
    *,
    num_heads: int = 3,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    d_model: int = 64,
    num_layers: int = 2,
    context_length: int = 256,
    seed: int = 0,
    eos_token_id: int = 510,
    num_rows: int = 512,
    tokenizer_from: Path | None = None,
) -> Path:
    """A random float32 llama with an untied head, 512 tokens, and a byte-level tokenizer that spells any text.

    `num_rows` above 512 pads embedding and head with rows that no token has.  `tokenizer_from` takes vocabulary and EOS
    from another GGUF file instead.

    Weights are large enough that each token of the context moves the logits well above rounding.
    """
    rng = np.random.default_rng(seed)
    if tokenizer_from is None:
        fields = _byte_level_vocabulary(512, eos_token_id)
    else:
        fields = _tokenizer_fields(tokenizer_from)
        num_rows = len(fields["tokenizer.ggml.tokens"])
    tensors = _random_layers(rng, num_layers, d_model, 2 * d_model, num_heads, num_kv_heads, head_dim)
    tensors |= {
        "model.embed_tokens.weight": rng.standard_normal((num_rows, d_model), np.float32),
        "model.norm.weight": np.ones(d_model, np.float32),
        "lm_head.weight": rng.standard_normal((num_rows, d_model), np.float32) / np.float32(d_model**0.5) * 3,
    }
    write_gguf(
        path, tensors, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        context_length=context_length, extra_fields=fields,
    )  # fmt: skip
    return path


def _random_layers(
    rng: np.random.Generator, num_layers: int, d_model: int, d_ff: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> dict[str, np.ndarray]:
    """HF-named layers; matrices keep the variance of what goes through them."""
    tensors = {}
    for layer in range(num_layers):
        shapes = {
            "self_attn.q_proj": (num_heads * head_dim, d_model),
            "self_attn.k_proj": (num_kv_heads * head_dim, d_model),
            "self_attn.v_proj": (num_kv_heads * head_dim, d_model),
            "self_attn.o_proj": (d_model, num_heads * head_dim),
            "mlp.gate_proj": (d_ff, d_model),
            "mlp.up_proj": (d_ff, d_model),
            "mlp.down_proj": (d_model, d_ff),
        }
        for name, shape in shapes.items():
            values = rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
            tensors[f"model.layers.{layer}.{name}.weight"] = values
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(d_model, np.float32)
    return tensors


def _byte_level_vocabulary(vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    """GGUF tokenizer fields: 256 bytes, merged pairs of letters, three control tokens at the end, a chat template."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    alphabet = "etaoinshrdlucmfw"
    pairs = [(left, right) for left in alphabet for right in alphabet][: vocab_size - 256 - 3]
    control = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokens = [*letters, *(left + right for left, right in pairs), *control]
    assert len(tokens) == vocab_size and 0 <= eos_token_id < vocab_size
    template = (
        "{% if tools %}{{'<|im_start|>system\n' + tools | tojson + '<|im_end|>\n'}}{% endif %}"
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (vocab_size - 3) + [3] * 3,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in pairs],
        "tokenizer.ggml.bos_token_id": vocab_size - 3,
        "tokenizer.ggml.eos_token_id": eos_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }
