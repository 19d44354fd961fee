"""Writes `configs/grafana.json`, the dashboard for the metrics page.  `python -m tools.make_dashboard`"""

from __future__ import annotations

import json
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "configs" / "grafana.json"
SELECT = '{model_name=~"$model"}'


def rate(name: str) -> str:
    return f"sum(rate(jserve:{name}{SELECT}[$__rate_interval]))"


def quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate(jserve:{name}_bucket{SELECT}[$__rate_interval])))"


def mean(name: str) -> str:
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"


def latency(name: str) -> dict[str, str]:
    return {"P50": quantile(0.5, name), "P99": quantile(0.99, name), "mean": mean(name)}


PANELS = (
    # title, unit, legend -> expression
    ("Tokens a second", "short", {
        "generated": rate("generation_tokens_total"), "prompt": rate("prompt_tokens_total"),
    }),
    ("Requests", "short", {
        "running": f"sum(jserve:num_requests_running{SELECT})", "waiting": f"sum(jserve:num_requests_waiting{SELECT})",
    }),
    ("KV cache in use", "percentunit", {"used": f"max(jserve:kv_cache_usage_perc{SELECT})"}),
    ("Time to first token", "s", latency("time_to_first_token_seconds")),
    ("Time between tokens", "s", latency("inter_token_latency_seconds")),
    ("End to end", "s", latency("e2e_request_latency_seconds")),
    ("Where a request's time goes (mean)", "s", {
        "queue": mean("request_queue_time_seconds"), "prefill": mean("request_prefill_time_seconds"),
        "decode": mean("request_decode_time_seconds"),
    }),
    ("Where a step's time goes (mean)", "s", {
        "host": mean("step_host_seconds"), "device": mean("step_device_seconds"),
    }),
    ("Tokens a step", "short", {
        "P50": quantile(0.5, "iteration_tokens_total"), "mean": mean("iteration_tokens_total"),
    }),
    ("Prefix cache hits", "percentunit", {
        "hit rate": f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}",
    }),
    ("Padding among computed tokens", "percentunit", {
        "padded": f"{rate('padded_tokens_total')} /"
        f" ({rate('padded_tokens_total')} + {rate('iteration_tokens_total_sum')})",
    }),
    ("Requests that ended, by reason, a second", "short", {
        "{{finished_reason}}": f"sum by (finished_reason) (rate(jserve:request_success_total{SELECT}"
        "[$__rate_interval]))",
        "refused": rate("requests_refused_total"), "failed": rate("requests_failed_total"),
    }),
    ("Preemptions a second", "short", {
        "preemptions": rate("num_preemptions_total"), "tokens lost": rate("preempted_tokens_lost_total"),
    }),
    ("Compiles after ready (should stay 0)", "short", {
        "compiles": f"sum(jserve:compiles_after_ready_total{SELECT})",
    }),
)
WIDTH, HEIGHT, PER_ROW = 8, 8, 3


def panel(number: int, title: str, unit: str, expressions: dict[str, str]) -> dict[str, object]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {
            "x": number % PER_ROW * WIDTH, "y": number // PER_ROW * HEIGHT, "w": WIDTH, "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend}
            for at, (legend, expression) in enumerate(expressions.items())
        ],
    }


def dashboard() -> dict[str, object]:
    return {
        "title": "jserve",
        "uid": "jserve",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus"},
            {
                "name": "model", "type": "query", "includeAll": True, "multi": True, "allValue": ".*",
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "query": "label_values(jserve:num_requests_running, model_name)", "refresh": 2,
                "current": {"text": "All", "value": "$__all"},
            },
        ]},
        "panels": [panel(number, *one) for number, one in enumerate(PANELS)],
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n")
    print(TARGET)
