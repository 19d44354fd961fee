"""How far a setting moves a model from float32: the oracle prompts of tests/golden, scored by the engine.

    python -m tools.quality --quantize int8
    python -m tools.quality --kv-dtype bfloat16

Prints the mean absolute and the mean difference of prompt log-probabilities against the other program's float32 (nats a
token), the change of perplexity that makes, and how many greedy tokens agree before the first that differs.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np

from jserve.config import Config
from jserve.llm import LLM
from jserve.request import SamplingParams

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "greedy.json"
SETTINGS = {"--quantize": ("model", "quantize"), "--dtype": ("model", "dtype"), "--kv-dtype": ("kv", "dtype")}


def main(arguments: list[str]) -> int:
    if len(arguments) % 2 or any(flag not in SETTINGS for flag in arguments[::2]):
        print(f"usage: python -m tools.quality [{'|'.join(SETTINGS)} VALUE]...", file=sys.stderr)
        return 2
    config = Config()
    for flag, value in zip(arguments[::2], arguments[1::2]):
        section, key = SETTINGS[flag]
        config = config.replace(section, **{key: value})
    records = [record for record in json.loads(GOLDEN.read_text()) if record["prompt_logprobs"]]
    config = config.replace("scheduler", max_num_seqs=16)
    config = config.replace("compile", token_buckets=(512,), sequence_buckets=(16,))
    with LLM("smollm2-135m", config=config) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=48, prompt_logprobs=0)
        outputs = llm.generate([record["prompt_token_ids"] for record in records], params)
    differences, agreeing, total = [], 0, 0
    for record, output in zip(records, outputs):
        ours = [entry.chosen.logprob for entry in output.prompt_logprobs[1:]]
        differences += list(np.array(ours) - np.array(record["prompt_logprobs"][1:]))
        theirs, mine = record["generated_token_ids"], output.outputs[0].token_ids
        total += len(theirs)
        agreeing += next((i for i, (a, b) in enumerate(zip(theirs, mine)) if a != b), min(len(theirs), len(mine)))
    mean = float(np.mean(differences))
    print(f"prompts {len(records)}, scored tokens {len(differences)}")
    print(f"prompt logprobs: mean |difference| {np.mean(np.abs(differences)):.4f}, mean difference {mean:+.4f} nats")
    print(f"perplexity: x {math.exp(-mean):.4f}")
    print(f"greedy tokens before the first other one: {agreeing} of {total} ({agreeing / total:.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
