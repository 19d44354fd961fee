"""OpenTelemetry spans of requests, where asked for: one a request, with its queueing, prefill and decoding inside.

Made when a request has ended, from its own times, so that nothing is done for them while it runs.  Attribute names are
those of OpenTelemetry's conventions for generative AI, as far as these go.
"""

from __future__ import annotations

from jserve.config import ConfigError
from jserve.request import GenerateUpdate, RequestError


class Spans:
    """Sends spans to `provider`, an OpenTelemetry TracerProvider."""

    def __init__(self, provider, model_name: str):
        self._provider = provider
        self._tracer = provider.get_tracer("jserve")
        self._model_name = model_name

    def ended(self, request_id: str, last: GenerateUpdate | None, failure: RequestError | None) -> None:
        """`last` has usage and metrics, or there is nothing to tell (the client left)."""
        if last is None or last.usage is None or last.metrics is None:
            return
        times = last.metrics
        end = times.last_token or times.first_scheduled or times.arrival
        whole = self._tracer.start_span("jserve.request", start_time=_ns(times.arrival))
        whole.set_attributes({
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.usage.input_tokens": last.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": last.usage.completion_tokens,
            "jserve.cached_tokens": last.usage.cached_tokens,
            "jserve.preemptions": times.num_preemptions,
        })
        reasons = [output.finish_reason.value for output in last.outputs if output.finish_reason is not None]
        if reasons:
            whole.set_attribute("gen_ai.response.finish_reasons", reasons)
        if failure is not None:
            whole.set_attribute("error.type", failure.code.value)
        phases = (
            ("queue", times.arrival, times.first_scheduled),
            ("prefill", times.first_scheduled, times.first_token),
            ("decode", times.first_token, times.last_token),
        )
        from opentelemetry import trace

        inside = trace.set_span_in_context(whole)
        for name, start, stop in phases:
            if start is not None and stop is not None:
                self._tracer.start_span(name, inside, start_time=_ns(start)).end(_ns(stop))
        whole.end(_ns(end))

    def close(self) -> None:
        """Sends what waits."""
        self._provider.shutdown()


def spans_to(endpoint: str | None, model_name: str) -> Spans | None:
    """Spans over OTLP/HTTP to `endpoint`, such as http://127.0.0.1:4318/v1/traces; None where there is none.

    Raises:
      ConfigError: the packages are missing.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(f"server.otlp_endpoint = {endpoint!r}: needs `pip install jserve[otel]`") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "jserve"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Spans(provider, model_name)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
