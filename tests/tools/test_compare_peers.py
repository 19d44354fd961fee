"""`tools/compare_peers.py` over two scripted servers: taking turns, agreement of tokens, and the table that grows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from jserve.bench.report import RequestRecord
from jserve.bench.target import Target
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_server import serving
from tools import compare_peers
from tools.peers import agreement, environments, servers, table

ROW = table.Row(
    peer="vLLM float32", our_name="jserve float32", load="128 in, 64 out", concurrency=8, ours=120.0, theirs=80.0,
    our_ttft_ms=500, their_ttft_ms=700, our_tpot_ms=60.0, their_tpot_ms=90.0, our_ready_s=6.0, their_ready_s=90.0,
    num_rounds=1, num_prompts=24, agreement=None, versions="0.32", machine="x86_64", date="2026-11-30",
)


def fake(name: str, step_s: float) -> servers.Launch:
    port = servers._free_port()
    command = [sys.executable, "-m", "tests.support.fake_server", "--port", str(port), "--step-s", str(step_s)]
    return servers.Launch(name, command, Target("jserve", f"127.0.0.1:{port}"), "1.0")


def test_two_servers_take_turns_and_the_table_says_how_much_faster_one_is(monkeypatch, tmp_path):
    monkeypatch.setattr(compare_peers, "with_model_on_disk", lambda config, say: config)
    monkeypatch.setattr(compare_peers, "convert", lambda source, target, format, dtype: None)
    monkeypatch.setattr(compare_peers.servers, "jserve", lambda *rest: fake("jserve float32", 0.01))
    monkeypatch.setattr(compare_peers.servers, "vllm", lambda *rest: fake("vLLM float32", 0.04))
    page = tmp_path / "benchmarks.md"
    flags = ["--only", "vllm", "--max-concurrency", "2", "--num-prompts", "6", "--output-len", "8", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["compare_peers", *flags, "--folder", str(tmp_path), "--page", str(page)])
    assert compare_peers.main() == 0
    (row,) = json.loads(page.with_suffix(".json").read_text())
    assert 1.5 < row["ours"] / row["theirs"] < 6 and row["num_rounds"] == 2
    assert row["agreement"]["num_equal"] == row["agreement"]["num_requests"] == 6
    assert "| 128 in, 8 out | 2 |" in page.read_text() and "6 of 6" in page.read_text()


async def test_a_server_that_dies_is_one_line(tmp_path):
    launch = replace(fake("peer", 0.01), command=[sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(servers.NotReady, match="peer: status 3; its output is in"):
        async with servers.running(launch, tmp_path / "log", 20.0):
            pass


def test_rows_are_replaced_by_key_and_the_rest_of_the_page_stays(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(f"# Before\n{table.BEGIN}\nbygone\n{table.END}\nafter\n")
    table.write(page, table.merge([], [ROW, replace(ROW, concurrency=1)]))
    table.write(page, table.merge(table.read(page.with_suffix(".json")), [replace(ROW, ours=160.0)]))
    text = page.read_text()
    assert text.startswith("# Before\n") and text.endswith("after\n") and "bygone" not in text
    assert "2.00x" in text and "1.50x" in text and text.count("jserve float32 against vLLM float32") == 1
    assert [row.concurrency for row in table.read(page.with_suffix(".json"))] == [1, 8]


def test_agreement_counts_equal_outputs_and_where_others_part():
    def records(*outputs):
        return [RequestRecord(3, 0.0, ((1.0, len(ids)),), 1.0, token_ids=tuple(ids)) for ids in outputs]

    found = agreement.compare(records([1, 2, 3, 4], [5, 6, 7, 8]), records([1, 2, 3, 4], [5, 6, 9, 9]))
    assert (found.num_requests, found.num_equal, found.prefix_share) == (2, 1, 0.75)
    assert agreement.compare(records([1]), records([])) is None, "a server that tells no ids"


async def test_a_margin_is_how_much_we_prefer_our_choice_to_theirs():
    """The scripted model gives its tokens 10, 11, ... -0.5, -1, ... nats, at every position."""
    def record(*ids):
        return RequestRecord(3, 0.0, ((1.0, len(ids)),), 1.0, token_ids=ids)

    ours, theirs = [record(10, 7)] * 3, [record(12, 7), record(10, 7), record(900, 7)]
    async with serving(FakeEngine()) as (server, _):
        found = await agreement.margins(server.address, [[1, 2, 3]] * 3, ours, theirs)
    assert found == pytest.approx((1.0, 0.5 * (agreement.NUM_ALTERNATIVES - 1))), "equal outputs have none"


def test_float32_tokens_may_part_only_where_rounding_explains_it():
    parted = {"num_requests": 4, "num_equal": 3, "prefix_share": 0.9, "margins": [0.001]}
    assert ROW.unexplained_nats is None and replace(ROW, agreement=parted).unexplained_nats is None
    sure = replace(ROW, agreement=parted | {"margins": [0.001, 0.7]})
    assert sure.unexplained_nats == 0.7 and replace(sure, peer="vLLM bfloat16").unexplained_nats is None


def test_the_kernels_of_llama_cpp_are_mended_once(tmp_path):
    kernels = tmp_path / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    kernels.parent.mkdir(parents=True)
    kernels.write_text('#include "amx.h"\n')
    assert environments._mend_tiles(tmp_path)
    assert kernels.read_text() == '#include "amx_tiles.h"\n#include "amx.h"\n'
    assert "ldtilecfg" in kernels.with_name("amx_tiles.h").read_text()
    assert not environments._mend_tiles(tmp_path)  # so that a finished build stays finished
