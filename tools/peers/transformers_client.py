"""Runs inside the environment of HF transformers: batches of prompts through `generate`, times by step.

stdin: {"model", "dtype", "concurrency", "threads", "prompts": [[ids]], "output_len"}; stdout, last line: [{"start",
"arrivals": [[time, 1]], "token_ids"}] and the version.  Knows nothing of jserve, which is not installed here.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):
    """Never stops anything: it is called after every step."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **_):
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@torch.inference_mode()
def generate(model, prompts, output_len):
    clock = Clock()
    start = time.perf_counter()
    ids = torch.tensor(prompts)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_len, min_new_tokens=output_len,
        do_sample=False, eos_token_id=None, pad_token_id=0, stopping_criteria=StoppingCriteriaList([clock]),
    )
    arrivals = [[at, 1] for at in clock.times]
    return [{"start": start, "arrivals": arrivals, "token_ids": row} for row in out[:, ids.shape[1] :].tolist()]


def main():
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    ready_s = time.perf_counter() - began
    size = job["concurrency"]
    generate(model, job["warm_ups"], 4)
    records = []
    for at in range(0, len(job["prompts"]), size):
        records += generate(model, job["prompts"][at : at + size], job["output_len"])
    print(json.dumps({"records": records, "version": transformers.__version__, "ready_s": ready_s}))


if __name__ == "__main__":
    main()
