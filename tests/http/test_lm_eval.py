"""lm-eval's local-completions on a task made of local data: its figures are those computed from the model's logits.

Runs where the command `lm_eval` is installed (`pip install '.[eval]'`, large), and is skipped elsewhere.
"""

import asyncio
import json
import os
import shutil
import subprocess

import pytest

from jserve.weights.load import load_model
from tests.http.test_real_engine import log_softmax
from tests.support.engines import running_engine
from tests.support.grpc_server import serving
from tests.support.tiny_models import full_logits, random_gguf

LM_EVAL = shutil.which("lm_eval")
QUESTIONS = ["the cat sat on", "a man in the", "to see or not to", "rain in"]
CHOICES = ["the mat", "moon", "see it all"]

CHOOSING = """\
task: choosing
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
CONTINUING = """\
task: continuing
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{continuation}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""

pytestmark = [
    pytest.mark.skipif(LM_EVAL is None, reason="lm_eval is not installed"), pytest.mark.slow, pytest.mark.timeout(1200)
]  # fmt: skip


async def test_a_harness_measures_what_the_model_computes(tmp_path):
    path = random_gguf(tmp_path / "tiny.gguf")
    model = load_model(str(path), "float32")
    with running_engine(path, model={"served_name": "tiny"}) as engine:

        def log_likelihood(context: str, continuation: str) -> float:
            start = len(engine.tokenizer.encode(context, add_special=False))
            ids = engine.tokenizer.encode(context + continuation, add_special=False)
            scores = log_softmax(full_logits(model.params, model.config, ids + [0] * (32 - len(ids))))
            return sum(scores[at - 1, ids[at]] for at in range(start, len(ids)))

        best = [max(range(3), key=lambda index: log_likelihood(question, " " + CHOICES[index]))
                for question in QUESTIONS]
        answers = [best[0], best[1], best[2], (best[3] + 1) % 3]  # so that 3 of 4 are right
        documents = [{"question": question, "choices": CHOICES, "answer": answer, "continuation": "?"}
                     for question, answer in zip(QUESTIONS, answers)]
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        for task in (CHOOSING, CONTINUING):
            name = task.split("\n")[0].split()[1]
            (tmp_path / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
        async with serving(engine, http_port=0) as (server, _):
            url = f"{server.http_url}/v1/completions"
            arguments = f"model=tiny,base_url={url},num_concurrent=2,tokenizer_backend=remote,tokenized_requests=True"
            command = [LM_EVAL, "run", "--model", "local-completions", "--model_args", arguments, "--tasks",
                       "choosing,continuing", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
                       "--log_samples", "--batch_size", "2"]
            offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=900,
                                           env={**os.environ, **offline})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [results] = (tmp_path / "out").rglob("results_*.json")
    figures = json.loads(results.read_text())["results"]
    assert figures["choosing"]["acc,none"] == 0.75
    assert figures["continuing"]["exact_match,none"] == 0.0
    [samples] = (tmp_path / "out").rglob("samples_choosing_*.jsonl")
    for sample in map(json.loads, samples.read_text().splitlines()):
        measured = [float(response[0]) for response in sample["filtered_resps"]]
        wanted = [log_likelihood(sample["doc"]["question"], " " + choice) for choice in CHOICES]
        assert measured == pytest.approx(wanted, abs=1e-3)
