"""A Llama-family GGUF as the folder that vLLM and transformers read: config, tokenizer, chat template, float32 weights.

    python -m tools.peers.hf_folder smollm2-135m FOLDER

The weights are those of the GGUF (dequantised), so that all engines compute the same model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy

from jserve.config import Config
from jserve.tokenizer import from_gguf
from jserve.weights.checkpoint import Checkpoint, open_checkpoint
from jserve.weights.fetch import with_model_on_disk

DONE = "complete"
"""Empty file that is written last."""


def write_folder(checkpoint: Checkpoint, folder: Path) -> Path:
    """Writes the folder unless it is complete already."""
    if (folder / DONE).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.read(0, tensor.num_rows) for name, tensor in checkpoint.tensors.items()}
    weights = {name: np.ascontiguousarray(array, np.float32) for name, array in weights.items()}
    safetensors.numpy.save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write(folder / "config.json", hf_config(checkpoint))
    _write(folder / "generation_config.json", _ids(checkpoint))
    _write_tokenizer(checkpoint, folder)
    (folder / DONE).touch()
    return folder


def hf_config(checkpoint: Checkpoint) -> dict[str, object]:
    config = checkpoint.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **_ids(checkpoint),
    }


def _ids(checkpoint: Checkpoint) -> dict[str, object]:
    """As the published config has them: one EOS."""
    eos = checkpoint.eos_token_ids
    return {"bos_token_id": checkpoint.config.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
            "pad_token_id": eos[0]}


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    fields = checkpoint.tokenizer_source
    (folder / "tokenizer.json").write_text(from_gguf(fields).to_json())
    tokens = fields["tokenizer.ggml.tokens"]
    eos = tokens[checkpoint.eos_token_ids[0]]
    bos = tokens[checkpoint.config.bos_token_id] if checkpoint.config.bos_token_id is not None else eos
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": eos,
        "model_max_length": checkpoint.config.context_length, "add_bos_token": False,
        "clean_up_tokenization_spaces": False, "chat_template": fields.get("tokenizer.chat_template"),
    })


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, default=int) + "\n")


def main() -> None:
    model, folder = sys.argv[1:]
    path = with_model_on_disk(Config().replace("model", path=model), print).model.path
    print(write_folder(open_checkpoint(path), Path(folder)))


if __name__ == "__main__":
    main()
