"""Prometheus exposition and scrape targets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mesh.metrics.embedding_metrics import EMBEDDING_OUTCOMES
from mesh.metrics.request_metrics import FINISH_REASONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from mesh.metrics.embedding_metrics import EmbeddingStatistics
    from mesh.metrics.request_metrics import Histogram, RequestStatistics

_STEM = "mesh_spec_decode_num"
_DEPTH_COUNTS: Final = {
    "drafted": "Tokens proposed, those of void windows too, by distance from the drafter's last feature.",
    "reached": "Those of them before which all tokens were accepted.",
    "accepted": "Those of them that the model chose too.",
}
PREFIX: Final = "mesh_"


class Sheet(Collector):
    """Samples of one scrape.

    Args:
        model: Value of the `model_name` label; `of` changes it for later samples.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._families: dict[str, Metric] = {}

    def of(self, model: str) -> None:
        """Set the model of all samples added from now on."""
        self._model = model

    def counter(self, name: str, help_: str, value: float, **labels: str) -> None:
        """Add a counter; its name ends in `_total`."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = CounterMetricFamily(name, help_)
        family.add_sample(f"{name}_total", self._labels(labels), value)

    def gauge(self, name: str, help_: str, value: float, **labels: str) -> None:
        """Add a gauge."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = GaugeMetricFamily(name, help_)
        family.add_sample(name, self._labels(labels), value)

    def histogram(self, name: str, help_: str, histogram: Histogram) -> None:
        """Add a histogram."""
        family = self._families.get(name)
        if not isinstance(family, HistogramMetricFamily):
            family = self._families[name] = HistogramMetricFamily(name, help_, labels=["model_name"])
        buckets = [(_bound(bound), count) for bound, count in histogram.cumulative()]
        family.add_metric([self._model], buckets, histogram.total)

    def collect(self) -> Iterator[Metric]:
        """Metrics, for `prometheus_client`."""
        yield from self._families.values()

    def _labels(self, labels: dict[str, str]) -> dict[str, str]:
        return {"model_name": self._model, **labels}


@dataclass(frozen=True)
class ModelFigures:
    """Figures of one model."""

    name: str
    """Model name for clients."""
    statistics: RequestStatistics
    """Request statistics."""
    status: Mapping[str, Any]
    """Its `/mesh/status`, with the stages' counters. Missing parts are left out."""


@dataclass(frozen=True)
class EmbeddingFigures:
    """Figures of one embedding model."""

    name: str
    """Model name for clients."""
    statistics: EmbeddingStatistics
    """Counts since it was loaded."""
    status: Mapping[str, Any]
    """Its entry in `/mesh/status`. Missing parts are left out."""


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))


def add_model(sheet: Sheet, status: Mapping[str, Any]) -> None:
    """Add samples of one model's ring.

    Args:
        sheet: Samples of the scrape.
        status: The model's `/mesh/status`.
    """
    if "ready" in status:
        sheet.gauge("mesh_ready", "1 while requests are answered at once, else 0.", int(status["ready"]))
    if "prefix_mismatches" in status:
        sheet.counter(
            "mesh_prefix_mismatches",
            "Sessions that restarted because a slot did not hold the expected tokens.",
            status["prefix_mismatches"],
        )
    if (repairs := status.get("repairs")) is not None:
        sheet.counter("mesh_stage_losses", "Stages lost.", repairs["losses"])
        sheet.counter("mesh_repairs", "Repairs of the ring.", repairs["count"])
        sheet.counter("mesh_moves", "Moves of layers without a failure.", repairs["moves"])
        if repairs["last_s"] is not None:
            sheet.gauge("mesh_last_repair_seconds", "Duration of the latest repair.", repairs["last_s"])


def add_mesh(sheet: Sheet, status: Mapping[str, Any]) -> None:
    """Add samples of the mesh as a whole.

    Args:
        sheet: Samples of the scrape.
        status: Body of `/mesh/status`.
    """
    if "version" in status:
        labels = {name: str(status[name]) for name in ("version", "protocol_version")}
        sheet.gauge("mesh_info", "Versions of the software.", 1, **labels)
    hosts = status.get("hosts", ())
    if isinstance(hosts, list):
        _add_hosts(sheet, hosts)


def _add_hosts(sheet: Sheet, hosts: list[Mapping[str, Any]]) -> None:
    states = [_state(host) for host in hosts]
    for state in ("serving", "spare", "joining", "leaving"):
        sheet.gauge("mesh_hosts", "Hosts by state.", states.count(state), state=state)
    num_copies = sum(len(host["copies"]) for host in hosts)
    sheet.gauge("mesh_spare_copies", "Replicas of stages that can take over at once.", num_copies)
    for host in hosts:
        sheet.gauge(
            "mesh_host_memory_bytes",
            "Memory of the host for the mesh.",
            host["memory_bytes"],
            host=host["name"],
        )


def _state(host: Mapping[str, Any]) -> str:
    if host["leaving"]:
        return "leaving"
    if not host["ready"]:
        return "joining"
    return "serving" if host["layers"] else "spare"


def add_requests(sheet: Sheet, statistics: RequestStatistics, sessions: Mapping[str, Any] | None) -> None:
    """Add samples of requests.

    Args:
        sheet: Samples of the scrape.
        statistics: Request statistics since the start.
        sessions: `sessions` of the status; None before the first ring.
    """
    for name, help_, histogram in (
        (
            "time_to_first_token",
            "Time from the request to the first token.",
            statistics.time_to_first_token_s,
        ),
        ("inter_token_latency", "Time between two tokens.", statistics.inter_token_s),
        ("e2e_request_latency", "Time from the request to the last token.", statistics.whole_s),
        ("request_queue_time", "Time in the queue, for a slot or a repair.", statistics.queue_s),
        ("request_prefill_time", "Time from the first window to the first token.", statistics.prefill_s),
        ("request_decode_time", "Time from the first token to the last.", statistics.decode_s),
    ):
        sheet.histogram(f"mesh_{name}_seconds", help_, histogram)
    sheet.counter("mesh_prompt_tokens", "Tokens of prompts.", statistics.num_prompt_tokens)
    sheet.counter("mesh_generation_tokens", "Tokens of answers.", statistics.num_generated_tokens)
    sheet.counter(
        "mesh_prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        statistics.num_cache_queries,
    )
    sheet.counter(
        "mesh_prefix_cache_hits", "Prompt tokens found in the prefix cache.", statistics.num_cache_hits
    )
    sheet.counter("mesh_request_replays", "Sessions replayed in another ring.", statistics.num_replays)
    for reason in FINISH_REASONS:
        sheet.counter(
            "mesh_request_success",
            "Requests that ended.",
            statistics.finished[reason],
            finished_reason=reason,
        )
    if sessions is not None:
        sheet.gauge("mesh_num_requests_running", "Requests with a slot.", sessions["running"])
        sheet.gauge("mesh_num_requests_waiting", "Requests that wait for a slot.", sessions["waiting"])
        sheet.gauge("mesh_num_requests_paused", "Requests whose client does not read.", sessions["paused"])
        room = sessions["slots"] * sessions["context"]
        sheet.gauge(
            "mesh_kv_cache_usage_perc", "Share of the KV caches' positions in use, 0 to 1.",
            sessions["positions"] / room,
        )  # fmt: skip


def add_ring(
    sheet: Sheet, stages: Sequence[Mapping[str, Any]], round_trips: Mapping[str, Any] | None
) -> None:
    """Add samples of the ring. A new ring counts from 0, as Prometheus expects after a restart.

    Args:
        sheet: Samples of the scrape.
        stages: `stages` of the status.
        round_trips: `round_trips` of the status; None before the first ring.
    """
    for stage in stages:
        _add_stage(sheet, stage)
    if round_trips is not None:
        _add_links(sheet, stages, round_trips)


def _add_stage(sheet: Sheet, stage: Mapping[str, Any]) -> None:
    start, stop = stage["layers"]
    labels = {"stage": str(stage["index"]), "host": stage["host"], "layers": f"[{start}, {stop})"}
    sheet.counter(
        "mesh_stage_windows", "Windows computed, chunks of prompts too.", stage["windows"], **labels
    )
    for kind, help_ in (("compute", "Computing windows."), ("queue", "Windows waiting at the stage.")):
        sheet.counter(f"mesh_stage_{kind}_seconds", help_, stage[f"{kind}_ms"] / 1000, **labels)
    if stage["rtt_ms"] is not None:
        sheet.gauge(
            "mesh_stage_rtt_seconds",
            "From the coordinator to the stage and back, the shortest of late.",
            stage["rtt_ms"] / 1000,
            **labels,
        )
    if "rows" not in stage:
        return  # the stage did not answer in time
    sheet.counter("mesh_stage_rows", "Rows computed.", stage["rows"], **labels)
    sheet.counter("mesh_stage_dropped_windows", "Void windows dropped.", stage["dropped_windows"], **labels)
    sheet.gauge("mesh_stage_queued_windows", "Windows that wait now.", stage["queued_windows"], **labels)
    sheet.gauge("mesh_stage_open_sessions", "Sessions that it knows.", stage["open_sessions"], **labels)
    sheet.gauge(
        "mesh_stage_resident_memory_bytes",
        "In memory, mapped files included.",
        stage["resident_bytes"],
        **labels,
    )


def _add_links(sheet: Sheet, stages: Sequence[Mapping[str, Any]], round_trips: Mapping[str, Any]) -> None:
    names = ["coordinator", *(f"stage {stage['index']}" for stage in stages), "coordinator"]
    sent_bytes = [round_trips["sent_bytes"], *(stage.get("sent_bytes") for stage in stages)]
    sent_bytes[-1] = round_trips["received_bytes"]
    for (source, target), wire_ms, num_bytes in zip(
        pairwise(names), round_trips["wire_ms"], sent_bytes, strict=True
    ):
        labels = {"source": source, "target": target}
        sheet.counter(
            "mesh_link_wire_seconds",
            "Windows that decode on their way over the link.",
            wire_ms / 1000,
            **labels,
        )
        sheet.counter("mesh_link_windows", "Those windows.", round_trips["windows"], **labels)
        if num_bytes is not None:
            sheet.counter("mesh_link_sent_bytes", "Sent over the link.", num_bytes, **labels)


def add_kv_disk(sheet: Sheet, kv_disk: Mapping[str, Any] | None) -> None:
    """Add samples of the blocks on the stages' disks. A new ring counts its stages from 0.

    Args:
        sheet: Samples of the scrape.
        kv_disk: `kv_disk` of the status; None where none are kept.
    """
    if kv_disk is None:
        return
    sheet.counter("mesh_kv_disk_hits", "Requests that began with tokens from disk.", kv_disk["fetched"])
    sheet.counter("mesh_kv_disk_restored_tokens", "Those tokens.", kv_disk["fetched_tokens"])
    sheet.counter(
        "mesh_kv_disk_failed_fetches",
        "Fetches that brought nothing, after which prompts were computed.",
        kv_disk["failed"],
    )
    for index, stage in enumerate(kv_disk["stages"]):
        if stage is not None:
            _add_blocks(sheet, stage, {"stage": str(index)})


def _add_blocks(sheet: Sheet, stage: Mapping[str, Any], labels: dict[str, str]) -> None:
    sheet.gauge("mesh_kv_disk_files", "Block files of the stage.", stage["files"], **labels)
    sheet.gauge("mesh_kv_disk_bytes", "Their size.", stage["bytes"], **labels)
    for name, help_ in (
        ("written", "Blocks written."),
        ("left_out", "Blocks left out: the disk was behind, full or failing."),
        ("damaged", "Damaged or foreign files, which were removed."),
    ):
        sheet.counter(f"mesh_kv_disk_{name}", help_, stage[name], **labels)


def add_speculation(sheet: Sheet, speculation: Mapping[str, Any] | None) -> None:
    """Add samples of speculation.

    Args:
        sheet: Samples of the scrape.
        speculation: `speculation` of the status; None before the first ring.
    """
    if speculation is None:
        return
    sheet.counter("mesh_windows", "Windows judged, chunks of prompts left out.", speculation["windows"])
    sheet.counter("mesh_stale_rows", "Rows that a rejection voided on their way.", speculation["stale_rows"])
    sheet.counter(
        "mesh_stale_rows_computed",
        "Those of them that all stages computed all the same.",
        speculation["stale_rows_computed"],
    )
    sheet.counter(
        "mesh_recomputed_rows",
        "Rows of accepted tokens that were computed again, in models with recurrent layers.",
        speculation["recomputed_rows"],
    )
    for name, proposer in speculation["proposers"].items():
        sheet.counter(f"{_STEM}_drafts", "Windows that proposed tokens.", proposer["drafts"], proposer=name)
        sheet.counter(
            f"{_STEM}_draft_tokens", "Tokens proposed and verified.", proposer["drafted"], proposer=name
        )
        sheet.counter(
            f"{_STEM}_accepted_tokens", "Those that the model chose too.", proposer["accepted"], proposer=name
        )
        for position, count in enumerate(proposer["accepted_per_position"]):
            sheet.counter(
                f"{_STEM}_accepted_tokens_per_pos",
                "By their place in the window.",
                count,
                proposer=name,
                position=str(position),
            )
        _add_depths(sheet, name, proposer)
    _add_features(sheet, speculation.get("features"))
    for kind in ("measured", "plain"):
        if (rate := speculation.get(f"{kind}_tokens_per_s")) is not None:
            sheet.gauge(
                "mesh_spec_decode_tokens_per_second",
                "Of the latest session: while it speculated, and what plain windows would bring.",
                rate,
                mode=kind,
            )


def _add_depths(sheet: Sheet, name: str, proposer: Mapping[str, Any]) -> None:
    for what, meaning in _DEPTH_COUNTS.items():
        for index, count in enumerate(proposer.get(f"{what}_per_depth", ())):
            sheet.counter(
                f"{_STEM}_{what}_tokens_per_depth", meaning, count, proposer=name, depth=str(index + 1)
            )


def _add_features(sheet: Sheet, features: Mapping[str, Any] | None) -> None:
    if features is None:
        return
    for what, meaning in (
        ("wanted", "Positions whose hidden states the drafter asked for."),
        ("received", "Those of them whose hidden states arrived."),
    ):
        sheet.counter(f"mesh_spec_decode_features_{what}", meaning, features[what])
    sheet.counter(
        "mesh_spec_decode_features_bytes", "Size of the hidden states that arrived.", features["bytes"]
    )


def add_embeddings(sheet: Sheet, statistics: EmbeddingStatistics, num_waiting: int) -> None:
    """Add samples of one embedding model.

    Args:
        sheet: Samples of the scrape.
        statistics: Counts since it was loaded.
        num_waiting: Requests with texts that wait.
    """
    sheet.histogram(
        "mesh_embedding_request_seconds",
        "Time from a request for vectors to its last one.",
        statistics.whole_s,
    )
    for outcome in EMBEDDING_OUTCOMES:
        sheet.counter(
            "mesh_embedding_requests",
            "Requests for vectors that ended.",
            statistics.finished[outcome],
            finished_reason=outcome,
        )
    sheet.gauge("mesh_embedding_requests_waiting", "Requests with texts that wait.", num_waiting)
    for what, help_, value in (
        ("texts", "Texts whose vectors were computed.", statistics.num_texts),
        ("tokens", "Tokens of these texts.", statistics.num_tokens),
        ("batches", "Batches of texts.", statistics.num_batches),
        ("compute_seconds", "Computing batches.", statistics.compute_s),
    ):
        sheet.counter(f"mesh_embedding_{what}", help_, value)


def exposition(
    models: Sequence[ModelFigures], accept: str = "", embedding_models: Sequence[EmbeddingFigures] = ()
) -> tuple[bytes, str]:
    """Body of one scrape.

    Args:
        models: At least one. Samples of the mesh as a whole have the first one's name.
        accept: `Accept` header of the request; OpenMetrics if it asks for that.
        embedding_models: Embedding models.

    Returns:
        Body and content type.
    """
    sheet = Sheet(models[0].name)
    for model in models:
        status = model.status
        sheet.of(model.name)
        add_requests(sheet, model.statistics, status.get("sessions"))
        add_speculation(sheet, status.get("speculation"))
        add_ring(sheet, status.get("stages", ()), status.get("round_trips"))
        add_kv_disk(sheet, status.get("kv_disk"))
        add_model(sheet, status)
    for embedding in embedding_models:
        sheet.of(embedding.name)
        counts = embedding.status.get("embeddings", {})
        add_embeddings(sheet, embedding.statistics, counts.get("waiting", 0))
        add_model(sheet, embedding.status)
    sheet.of(models[0].name)
    add_mesh(sheet, models[0].status)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(sheet)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def targets(host: str, scheme: str, model: str) -> list[dict[str, Any]]:
    """One target: the coordinator, which exposes all hosts of its mesh.

    Args:
        host: Name and port of the request's URL, which the scraper can reach; none if unknown.
        scheme: `http` or `https`.
        model: Model name for clients.
    """
    if not host:
        return []
    labels = {"__metrics_path__": "/metrics", "__scheme__": scheme, "job": "spanmesh", "mesh_model": model}
    return [{"targets": [host], "labels": labels}]
