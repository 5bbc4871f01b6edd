"""Prometheus metrics of the proxy, over all its workers."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from ...core.records import CallEnd, CallStatus
from ...core.tokens import NOT_THE_POLICY

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# Where several workers share their counts; prometheus_client looks at it when it is imported.
SHARED = "PROMETHEUS_MULTIPROC_DIR"
# Each gauge's help text and labels, by name. The values are from the store: the newest that a worker read is right.
_GAUGES: dict[str, tuple[str, ...]] = {
    "policy_version": ("The live policy version",),
    "policy_verify_deviations": (
        "By how many standard deviations the live version's answers matched the new weights, not the old; 0: unknown",
    ),
    "policy_probed_seconds": ("Unix time when the live version was last probed",),
    "policy_probe_ok": ("0 if the policy's server answers as if it had other weights",),
    "policy_collapsed": ("1 if publishing has stopped because of this sign of collapse", "sign"),
    "step": ("Metrics of the last training step, named as in docs/step-metrics.md; step: its number", "metric"),
    "upstream_up": ("1 if a watched server is up", "upstream", "replica"),
    "rollouts": ("Rollouts in the store", "mode", "status"),
    "rollouts_waiting": ("Complete rollouts that no training step has taken yet",),
    "rollouts_per_step": ("Rollouts that a training step takes",),
    "step_began_seconds": ("Unix time when the training step under way began; 0 if there is none",),
    "store_up": ("1 if the store can be read and written",),
    "disk_free_bytes": ("Free space on the disk of this directory: store or policy", "directory"),
}


class Metrics:
    """The metrics of one app. All workers of a proxy share them; several apps in one process do not."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._shared = Path(shared) if (shared := os.environ.get(SHARED)) else None
        if self._shared is not None:  # workers that crashed: their gauges go, their counts stay
            for pid in {int(file.stem.rpartition("_")[2]) for file in self._shared.glob("gauge_live*_*.db")}:
                try:
                    os.kill(pid, 0)
                except ProcessLookupError:
                    mark_process_dead(pid, str(self._shared))
        seconds = partial(Histogram, buckets=_SECONDS, registry=self._registry)
        self._latency = seconds("lightning_call_seconds", "Seconds from a call's start to its end")
        self._ttft = seconds("lightning_first_byte_seconds", "Seconds until the first byte of a streamed answer")
        calls = self.counter("calls", "Recorded calls, by how they ended", "status")
        unrecorded = self.counter("unrecorded_calls", "Calls without a record, by how they ended", "status")
        # Looked up once: so they are shown from the start, and a call needs no look-up.
        self._calls, self._unrecorded = (
            {s: one.labels(s) for s in get_args(CallStatus)} for one in (calls, unrecorded)
        )
        self._untrainable = self.counter("untrainable_calls", "Answered calls of the policy that cannot be trained on")
        tokens = self.counter("tokens", "Tokens of recorded calls that have token ids", "kind")
        self._prompt, self._sampled = tokens.labels("prompt"), tokens.labels("sampled")
        self.redacted = self.counter("redacted_calls", "Calls that cannot be trained on only because of redaction")
        self.continuity = self.counter("token_continuity", "Policy chats, by how their prompt was sent", "outcome")
        self.rewards = self.counter("rewards", "Recorded rewards")
        deleted = "Deleted rollouts, by reason: request, age or size of the store"
        self.deleted = self.counter("rollouts_deleted", deleted, "why")
        self._gauges = {name: self.gauge(name, *about) for name, about in _GAUGES.items()}
        queue = "Records that wait for their commit"
        self._gauges["recorder_queue"] = self.gauge("recorder_queue", queue, mode="livesum")  # each worker has its own

    def call_ended(self, end: CallEnd, recorded: bool) -> None:
        if not recorded:
            self._unrecorded[end.status].inc()
            return
        self._calls[end.status].inc()
        if end.status == "ok" and end.untrainable_reason not in (None, NOT_THE_POLICY):
            self._untrainable.inc()
        self._prompt.inc(len(end.prompt_token_ids))
        self._sampled.inc(sum(len(choice.token_ids) for choice in end.choices))
        self._latency.observe(end.latency_ms / 1000)
        if end.ttft_ms is not None:
            self._ttft.observe(end.ttft_ms / 1000)

    def set(self, name: str, value: float, *labels: str) -> None:
        gauge = self._gauges[name]
        (gauge.labels(*labels) if labels else gauge).set(value)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"lightning_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str, mode: str = "livemostrecent") -> Gauge:
        return Gauge(f"lightning_{name}", text, labels, registry=self._registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        if self._shared is None:
            return generate_latest(self._registry)
        all_workers = CollectorRegistry()
        MultiProcessCollector(all_workers, str(self._shared))
        return generate_latest(all_workers)
