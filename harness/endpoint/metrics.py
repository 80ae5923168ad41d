"""Reads what vLLM and SGLang say of their caches at `/metrics`, in the form of Prometheus.

The names are those of vllm/v1/metrics/loggers.py and of sglang/srt/metrics/collector.py; the latter
are there under `--enable-metrics`."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from threading import Lock

from harness.endpoint.client import Client, ServerGone, ServerRefused

# ours -> theirs; of several the first that is there
GAUGES = {
    "cache_share": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
}
COUNTERS = {
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
}
LINE = re.compile(r"^([\w:]+)(?:\{.*\})?\s+([-+.\deE]+)(?:\s+\d+)?$", re.MULTILINE)


@dataclass
class Metrics:
    """Follows the metrics of one server. Each look says how far counters have come since the last."""

    client: Client
    there: bool = True  # until the server has none
    _last: dict[str, float] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def look(self) -> dict[str, float]:
        """Return the present share of the cache in use, and what counters gained since the last look;
        empty where the server does not say."""
        with self._lock:
            if not self.there:
                return {}
            try:
                said = parsed(str(self.client.whole("/metrics").get("text", "")))
            except (ServerGone, ServerRefused):
                said = {}
            self.there = bool(said)
            gained = {
                key: said[key] - self._last.get(key, said[key]) for key in COUNTERS.keys() & said
            }
            self._last = said
            return gained | {key: said[key] for key in GAUGES.keys() & said}


def parsed(text: str) -> dict[str, float]:
    """Return the metrics that we know by our names: gauges as the largest of all series, counters as
    their sum."""
    series = defaultdict[str, list[float]](list)
    for name, value in LINE.findall(text):
        series[name].append(float(value))
    found = dict[str, float]()
    for ours, names in (GAUGES | COUNTERS).items():
        if there := [series[name] for name in names if name in series]:
            found[ours] = max(there[0]) if ours in GAUGES else sum(there[0])
    return found
