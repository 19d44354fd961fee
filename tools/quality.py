"""How far a setting moves a model from float32: the oracle prompts of tests/golden, scored by the engine.

    python -m tools.quality --quantize int8
    python -m tools.quality --kv-dtype int8
    python -m tools.quality --kv-dtype f32,f16,bf16,int8,fp8        one line for each

Prints the mean absolute and the mean difference of prompt log-probabilities against the other program's float32 (nats a
token), the change of perplexity that makes, and how many greedy tokens agree before the first that differs.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jserve.config import Config
from jserve.llm import LLM
from jserve.request import SamplingParams

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "greedy.json"
SETTINGS = {"--quantize": ("model", "quantize"), "--dtype": ("model", "dtype"), "--kv-dtype": ("kv", "dtype")}


@dataclass(frozen=True)
class Quality:
    """Against the other program's float32."""

    num_prompts: int
    differences: np.ndarray  # f64[scored tokens] of log-probabilities, ours less theirs
    num_agreeing: int
    """Greedy tokens before the first that differs."""
    num_greedy: int

    def __str__(self) -> str:
        sizes, mean = np.abs(self.differences), float(np.mean(self.differences))
        return (
            f"{self.num_prompts} prompts, {len(sizes)} scored tokens: |difference| of log-probabilities mean "
            f"{np.mean(sizes):.5f}, 99th percentile {np.percentile(sizes, 99):.4f}, most {np.max(sizes):.4f} nats; "
            f"mean difference {mean:+.5f}, perplexity x {math.exp(-mean):.5f}; greedy tokens before the first other one "
            f"{self.num_agreeing} of {self.num_greedy} ({self.num_agreeing / max(1, self.num_greedy):.0%})"
        )


def measure(config: Config, records: list[dict], max_tokens: int = 48) -> Quality:
    """Scores the records' prompts and continues them greedily."""
    config = config.replace("scheduler", max_num_seqs=16)
    config = config.replace("compile", token_buckets=(512,), sequence_buckets=(16,))
    with LLM("smollm2-135m", config=config) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=0)
        outputs = llm.generate([record["prompt_token_ids"] for record in records], params)
    differences, agreeing, total = [], 0, 0
    for record, output in zip(records, outputs):
        ours = [entry.chosen.logprob for entry in output.prompt_logprobs[1:]]
        differences += list(np.array(ours) - np.array(record["prompt_logprobs"][1:]))
        theirs, mine = record["generated_token_ids"][:max_tokens], output.outputs[0].token_ids
        total += len(theirs)
        agreeing += next((i for i, (a, b) in enumerate(zip(theirs, mine)) if a != b), min(len(theirs), len(mine)))
    return Quality(len(records), np.array(differences), agreeing, total)


def scored_records() -> list[dict]:
    return [record for record in json.loads(GOLDEN.read_text()) if record["prompt_logprobs"]]


def main(arguments: list[str]) -> int:
    if len(arguments) % 2 or any(flag not in SETTINGS for flag in arguments[::2]):
        print(f"usage: python -m tools.quality [{'|'.join(SETTINGS)} VALUE[,VALUE]...]...", file=sys.stderr)
        return 2
    choices = [[(flag, value) for value in values.split(",")] for flag, values in zip(arguments[::2], arguments[1::2])]
    for chosen in itertools.product(*choices):
        config = Config()
        for flag, value in chosen:
            section, key = SETTINGS[flag]
            config = config.replace(section, **{key: value})
        print(" ".join(f"{flag} {value}" for flag, value in chosen), flush=True)
        print(f"  {measure(config, scored_records())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
