"""A span for each request that ended, with its phases inside; none where none were asked for."""

from __future__ import annotations

import gzip
import http.server
import sys
import threading

import pytest

from jserve.config import ConfigError
from jserve.engine.spans import Spans, spans_to
from jserve.request import GenerateRequest, SamplingParams
from tests.support.stand_in import stand_in_engine

sdk = pytest.importorskip("opentelemetry.sdk.trace")


async def test_a_request_is_a_span_with_queue_prefill_and_decode_inside():
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with stand_in_engine() as engine:
        assert engine._spans is None, "off unless asked for"
        engine._spans = Spans(provider, "m")
        params = SamplingParams(max_tokens=4)
        request = GenerateRequest(prompt_token_ids=[1, 2, 3], request_id="r", sampling_params=params)
        answer = await engine.generate_all(request)
        spans = {span.name: span for span in kept.get_finished_spans()}
    whole = spans["jserve.request"]
    assert dict(whole.attributes) == {
        "gen_ai.request.id": "r", "gen_ai.response.model": "m", "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4, "jserve.cached_tokens": 0, "jserve.preemptions": 0,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert set(spans) == {"jserve.request", "queue", "prefill", "decode"}
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(span.parent.span_id == whole.context.span_id for span in phases)
    assert [span.end_time for span in phases[:2]] == [span.start_time for span in phases[1:]]
    assert (phases[0].start_time, phases[2].end_time) == (whole.start_time, whole.end_time)
    assert whole.start_time == int(answer.metrics.arrival * 1e9)


async def test_a_collector_receives_them_and_their_times_nest():
    """Over OTLP/HTTP, as `--server.otlp_endpoint` sends them."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    posts = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            packed = self.headers.get("Content-Encoding") == "gzip"
            posts.append((self.path, ExportTraceServiceRequest.FromString(gzip.decompress(body) if packed else body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_): ...

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    try:
        with stand_in_engine() as engine:
            engine._spans = spans_to(f"http://127.0.0.1:{collector.server_port}/v1/traces", "m")
            params = SamplingParams(max_tokens=3)
            await engine.generate_all(GenerateRequest(prompt_token_ids=[1, 2], request_id="r", sampling_params=params))
            engine._spans.close()
            engine._spans = None
    finally:
        collector.shutdown()
        collector.server_close()
    assert {path for path, _ in posts} == {"/v1/traces"}
    resources = [one for _, message in posts for one in message.resource_spans]
    assert {(a.key, a.value.string_value) for a in resources[0].resource.attributes} >= {("service.name", "jserve")}
    spans = {span.name: span for one in resources for scope in one.scope_spans for span in scope.spans}
    whole = spans.pop("jserve.request")
    assert set(spans) == {"queue", "prefill", "decode"}
    assert {one.parent_span_id for one in spans.values()} == {whole.span_id}
    assert all(whole.start_time_unix_nano <= one.start_time_unix_nano <= one.end_time_unix_nano
               <= whole.end_time_unix_nano for one in spans.values())


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"server.otlp_endpoint = .*pip install jserve\[otel\]"):
        spans_to("http://127.0.0.1:4318/v1/traces", "m")
    assert spans_to(None, "m") is None
