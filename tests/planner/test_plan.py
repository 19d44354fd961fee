"""The planner's arithmetic: every number of the source document, and what does not fit is refused with numbers."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from jserve.cli import main as cli
from jserve.config import ConfigError
from jserve.planner.bucket_choice import choose_buckets, padding_of
from jserve.planner.deployment import Question, predict
from jserve.planner.devices import DEVICES, find_device
from jserve.planner.roofline import Roofline, stored_width
from jserve.planner.shapes import BUILT_IN, find_model, from_hf
from jserve.scheduler.buckets import powers_up_to


def plan_json(capsys, *flags: str) -> dict:
    assert cli.main(["plan", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def llama(capsys) -> dict:
    """Llama 3 8B on an 80 GB card, as the source document has it: no flag beyond model and device."""
    return plan_json(capsys, "--model", "llama-3-8b", "--device", "h100-80gb")


def test_memory_of_the_source_document(llama):
    assert llama["usable_bytes"] == 72e9
    assert round(llama["weight_bytes"] / 1e9, 2) == 16.06
    assert round(llama["kv_pool_bytes"] / 1e9, 4) == 53.9395
    assert llama["kv_bytes_per_token"] == 131_072
    assert llama["kv_pool_tokens"] == 411_525
    assert llama["num_blocks"] == 411_525 // 16


def test_concurrency_of_the_source_document(llama):
    assert llama["max_sequences"] == {"paged": 408, "preallocated": 50}
    assert round(llama["paged_over_preallocated"], 1) == 8.2
    assert llama["block_waste"] == {"tokens": 7.5, "share": 0.0075}


def test_steps_of_the_source_document(llama):
    steps = {step["batch"]: step for step in llama["steps"]}
    assert [round(steps[batch]["lower_bound_ms"], 2) for batch in (32, 50, 128, 408)] == [6.05, 6.75, 9.80, 20.76]
    assert [round(steps[batch]["bytes"] / 1e9, 2) for batch in (50, 408)] == [22.61, 69.54]
    assert [int(steps[batch]["tokens_per_s"]) for batch in (50, 408)] == [7_406, 19_655]
    assert round(steps[50]["tokens_per_s"]) == 7_407
    gain = llama["paging_gain"]
    assert (round(gain["tokens_per_s"], 1), round(gain["step_time"], 1)) == (2.7, 3.1)


def test_chunks_of_the_source_document(llama):
    schedule = llama["chunk_schedule"]
    assert (schedule["prompt"], schedule["decodes"], schedule["budget"]) == (32_768, 32, 2_048)
    assert (schedule["num_steps_whole_budget"], schedule["num_steps"]) == (16, 17)
    assert [round(llama["prefill"][at]["ms"]) for at in (0, -1)] == [30, 63]
    assert [(chunk["chunk"], chunk["past"]) for chunk in llama["prefill"]] == [(2048, 2048 * k) for k in range(16)]
    assert schedule["whole_prompt"]["flops"] == pytest.approx(7.39e14, rel=1e-3)
    assert round(schedule["whole_prompt"]["ms"] / 1e3, 2) == 0.75
    assert round(schedule["whole_prompt"]["ms_at_half_rate"] / 1e3, 1) == 1.5
    assert sum(chunk["chunk"] for chunk in schedule["chunks"]) == 32_768


def test_prefix_hit_of_the_source_document(llama):
    hit = llama["prefix_hit"]
    assert (hit["num_blocks"], hit["hit_tokens"], hit["tokens_to_prefill"]) == (125, 2_000, 210)
    assert round(hit["share"], 3) == 0.095


def test_the_table_shows_the_same_numbers(capsys):
    assert cli.main(["plan", "--model", "llama-3-8b", "--device", "h100-80gb"]) == 0
    text = capsys.readouterr().out
    for number in (
        "53.9395 GB", "131,072", "411,525", "8.2x", "(0.75%)", "2.7x", "3.1x", "6.05", "6.75", "9.80", "20.76",
        "22.61", "69.54", "7,407", "19,655", "125 blocks", "210 left", "9.5%", "30.0", "63.3", "746", "1,493",
    ):
        assert number in text, number


def test_the_chunks_of_a_prompt_cost_as_much_as_the_whole():
    roofline = Roofline(find_model("llama-3-8b"), find_device("h100-80gb"))
    chunks = predict(roofline, Question(8192)).chunks
    head = 2 * 128_256 * 4_096 * (len(chunks.whole_budget) - 1)  # every chunk has a row for the head
    assert sum(chunk.flops for chunk in chunks.whole_budget) == pytest.approx(chunks.whole_prompt.flops + head)


def test_a_window_bounds_what_a_sequence_holds_and_reads():
    roofline = Roofline(find_model("gemma-3-12b"), find_device("h200"))
    short, long = (predict(roofline, Question(131_072, mean_length=length)) for length in (1_000, 100_000))
    full_layers, window_layers = roofline.kv_bytes_per_token
    assert full_layers * 5 == window_layers
    assert long.max_paged > short.max_paged / 100 * 3  # a hundred times the length, far less than that in memory
    read = roofline.decode(1, 100_000).bytes - roofline.weight_bytes
    assert read == pytest.approx(full_layers * 100_000 + window_layers * 1_025)


def test_what_cannot_fit_is_refused_with_the_numbers(capsys):
    assert cli.main(["plan", "--model", "llama-3-70b", "--device", "h100-80gb"]) == 1
    line = capsys.readouterr().err
    assert "72.00 GB usable" in line and "141.11 GB" in line and "4 or more devices" in line
    assert cli.main(["plan", "--model", "llama-3-70b", "--device", "h100-80gb", "--tp", "4"]) == 0


@pytest.mark.parametrize(
    "model, flags, code, message",
    [
        ("llama-9", ["--device", "h200"], 1, "built in: smollm2-135m"),
        ("llama-3-8b", ["--device", "h300"], 2, "known: a100-80gb"),
        ("llama-3-8b", ["--device", "h200", "--tp", "3"], 2, "32 heads and an ffn of 14336 must both divide by it"),
        ("llama-3-8b", ["--device", "v6e-8", "--tp", "16"], 2, "has 8 devices"),
        ("llama-3-8b", ["--device", "h200", "--budget", "32"], 2, "leave nothing"),
    ],
)
def test_what_cannot_be_planned_is_one_line(capsys, model, flags, code, message):
    assert cli.main(["plan", "--model", model, *flags]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--model", "llama-3-8b"], ["--device", "h200"], ["--model", "x", "--batch", "0"]])
def test_missing_and_malformed_flags_are_bad_usage(capsys, flags):
    assert cli.main(["plan", *flags]) == 2
    assert capsys.readouterr().err


def test_every_model_and_device_gives_an_answer_or_a_refusal():
    for model, device in itertools.product(BUILT_IN.values(), DEVICES.values()):
        devices = int(np.gcd(device.num_devices, model.num_heads))
        try:
            plan = predict(Roofline(model, device, tensor_parallel_size=devices), Question(model.context_length))
        except ConfigError as refusal:
            assert "does not fit" in str(refusal)
        else:
            assert plan.max_paged >= plan.max_preallocated and plan.recommended.max_num_seqs >= 1


def test_a_config_file_gives_the_same_shape_as_its_built_in_name(tmp_path, capsys):
    settings = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    for name in (str(path), str(tmp_path)):
        answer = plan_json(capsys, "--model", name, "--device", "h100-80gb")
        assert answer["kv_pool_tokens"] == 411_525 and answer["num_parameters"] == 8_030_261_248


def test_gemma_configs_split_their_layers_into_groups():
    sizes = {
        "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "intermediate_size": 10240, "vocab_size": 262208, "sliding_window": 1024,
    }
    shape = from_hf({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **sizes}}, "g")
    built_in = BUILT_IN["gemma-3-4b"]
    assert (shape.groups, shape.num_parameters) == (built_in.groups, built_in.num_parameters)
    typed = from_hf({**sizes, "layer_types": ["sliding_attention", "full_attention"] * 17}, "g")
    assert [group.num_layers for group in typed.groups] == [17, 17]


@pytest.mark.parametrize("key, value", [("num_local_experts", 8), ("kv_lora_rank", 512), ("hidden_size", None)])
def test_a_config_that_would_give_wrong_numbers_is_refused_by_name(key, value):
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=9)
    with pytest.raises(ConfigError, match="experts" if "experts" in key else key):
        from_hf({**sizes, key: value}, "m")


def test_stored_widths_are_those_of_the_kernels_layout():
    from pallas_kernels.paged_attention.layout import layout

    for platform, head_dim in itertools.product(("cpu", "gpu", "tpu"), (32, 64, 80, 96, 128, 192, 256)):
        one = layout(platform, 1, head_dim, 1, "bfloat16")
        assert stored_width(platform, head_dim) == one.planes * one.lanes, (platform, head_dim)


def test_the_compile_plan_is_the_runners_own(llama):
    compiled = llama["compile_plan"]
    assert compiled["token_buckets"] == llama["recommended"]["token_buckets"]
    assert compiled["num_programs"] == sum(compiled[kind] for kind in ("forward", "heads", "samplers", "scorers"))
    assert compiled["heads"] == len(compiled["sequence_buckets"])
    assert compiled["forward"] == len(compiled["token_buckets"]) + len(compiled["sequence_buckets"])


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 4, 9])
def test_chosen_buckets_pad_least_of_all_choices(num_buckets):
    random = np.random.default_rng(num_buckets)
    for _ in range(20):
        sizes = random.integers(1, 13, 6)
        counts = {int(size): int(count) for size, count in zip(sizes, random.integers(1, 50, 6))}
        chosen = choose_buckets(counts, num_buckets, 16)
        assert chosen[-1] == 16 and len(chosen) <= num_buckets
        others = [
            (*others, 16) for k in range(num_buckets) for others in itertools.combinations(range(1, 16), k)
        ]
        assert padding_of(counts, chosen)[1] == min(padding_of(counts, buckets)[1] for buckets in others)


def test_chosen_buckets_beat_powers_of_two():
    counts = {300: 900, 33: 500, 700: 40}
    powers = powers_up_to(16, 1024)
    chosen = choose_buckets(counts, len(powers), 1024)
    assert padding_of(counts, chosen)[1] == 0 < padding_of(counts, powers)[1]
