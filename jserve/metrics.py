"""What an engine counts: plain numbers for `GetLoads`, and Prometheus histograms for the metrics page.

Names and suffixes are vLLM's with the prefix `jserve:`.  Each engine has its own registry; gauges and counters are read
from the engine at scrape time, so they are right also when no step runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

log = logging.getLogger(__name__)

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass
class StepTotals:
    """Totals over all steps since start; the engine thread writes."""

    num_steps: int = 0
    host_seconds: float = 0.0
    """Time of schedule + build + launch + apply on the engine thread."""
    device_seconds: float = 0.0
    """Time from a step's launch, or the previous result where that came later, to its result."""
    scheduled_tokens: int = 0
    padded_tokens: int = 0
    generated_tokens: int = 0


@dataclass
class RequestCounts:
    """Requests by outcome; accepted == stopped + length + aborted + failed + in flight at any time."""

    accepted: int = 0
    refused: int = 0
    stopped: int = 0
    length: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0

    @property
    def finished(self) -> int:
        return self.stopped + self.length

    @property
    def in_flight(self) -> int:
        return self.accepted - self.finished - self.aborted - self.failed


class Distribution:
    """A histogram that costs nobody a step: what goes wrong in it is logged, the first time, and not raised."""

    def __init__(self, histogram: Histogram):
        self.histogram = histogram
        self._has_failed = False

    def observe(self, value: float) -> None:
        try:
            self.histogram.observe(value)
        except Exception:
            if not self._has_failed:
                log.exception("a metric cannot be recorded; its figures are wrong from here on")
            self._has_failed = True


class Histograms:
    """Distributions that a scrape cannot reconstruct; observed by the engine and output threads."""

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Distribution:
            metric = Histogram(f"jserve:{name}", doc, ["model_name"], buckets=buckets, registry=self.registry)
            return Distribution(metric.labels(model_name))

        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Gap between tokens", _GAP_SECONDS)
        self.e2e_latency = histogram("e2e_request_latency_seconds", "Arrival to last token", _SECONDS)
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to first scheduled", _SECONDS)
        self.prefill_time = histogram("request_prefill_time_seconds", "First scheduled to first token", _SECONDS)
        self.decode_time = histogram("request_decode_time_seconds", "First token to last token", _SECONDS)
        self.iteration_tokens = histogram("iteration_tokens_total", "Tokens computed in a step", _TOKENS)
        self.step_host = histogram("step_host_seconds", "Host time of a step", _STEP_SECONDS)
        self.step_device = histogram("step_device_seconds", "Device time of a step", _STEP_SECONDS)


class LoadsCollector:
    """Gauges and counters read from `engine.loads()` when the page is scraped."""

    def __init__(self, loads: Callable[[], object], model_name: str):
        """`loads` returns a `jserve.engine.info.Loads`."""
        self._loads = loads
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        loads = self._loads()
        yield self._gauge("num_requests_running", "Sequences that run", loads.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait", loads.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", loads.kv_usage)
        yield self._gauge("kv_blocks_saved", "KV blocks that sharing saves running sequences", loads.num_saved_blocks)
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", loads.prefix_cache_queried_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache", loads.prefix_cache_hit_tokens),
            "num_preemptions": ("Preemptions", loads.num_preemptions),
            "num_swap_preemptions": ("Preemptions that moved KV to host memory", loads.num_swap_preemptions),
            "swapped_out_bytes": ("KV bytes moved to host memory", loads.swapped_out_bytes),
            "swapped_in_bytes": ("KV bytes moved back from host memory", loads.swapped_in_bytes),
            "preempted_tokens_lost": ("Computed tokens that preemption dropped", loads.preempted_tokens_lost),
            "prompt_tokens": ("Prompt tokens of accepted requests", loads.prompt_tokens),
            "generation_tokens": ("Tokens generated", loads.generated_tokens),
            "padded_tokens": ("Padding computed to fill buckets", loads.padded_tokens),
            "compiles_after_ready": ("Programs compiled after readiness", loads.compiles_after_ready),
        }
        for name, (doc, value) in counters.items():
            yield self._counter(name, doc, value)
        yield self._gauge("kv_host_cached_blocks", "Cached KV blocks in host memory", loads.num_host_cached_blocks)
        hits = {"host": loads.host_tier_hit_tokens, "disk": loads.disk_tier_hit_tokens}
        saved = {"host": loads.host_tier_saved_bytes, "disk": loads.disk_tier_saved_bytes}
        loaded = {"host": loads.host_tier_loaded_bytes, "disk": loads.disk_tier_loaded_bytes}
        yield self._by_tier("prefix_cache_tier_hits", "Prompt tokens whose KV came back from a lower tier", hits)
        yield self._by_tier("kv_tier_saved_bytes", "KV bytes of cached prefixes moved to a lower tier", saved)
        yield self._by_tier("kv_tier_loaded_bytes", "KV bytes of cached prefixes moved back from a lower tier", loaded)
        ended = CounterMetricFamily(
            "jserve:request_success", "Requests that ended, by reason", labels=["model_name", "finished_reason"]
        )
        reasons = {"stop": loads.requests_stopped, "length": loads.requests_length, "abort": loads.requests_aborted}
        for reason, value in reasons.items():
            ended.add_metric([self._model_name, reason], value)
        yield ended
        yield self._counter("requests_accepted", "Requests that were queued", loads.requests_accepted)
        yield self._counter("requests_refused", "Requests that were refused", loads.requests_refused)
        yield self._counter("requests_failed", "Requests that ended with INTERNAL", loads.requests_failed)

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"jserve:{name}", doc, labels=["model_name"])
        metric.add_metric([self._model_name], value)
        return metric

    def _by_tier(self, name: str, doc: str, values: dict[str, float]) -> Metric:
        metric = CounterMetricFamily(f"jserve:{name}", doc, labels=["model_name", "tier"])
        for tier, value in values.items():
            metric.add_metric([self._model_name, tier], value)
        return metric

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"jserve:{name}", doc, labels=["model_name"])
        metric.add_metric([self._model_name], value)
        return metric
