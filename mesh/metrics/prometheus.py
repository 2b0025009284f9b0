"""Prometheus exposition and scrape targets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mesh.metrics.request_metrics import EMBEDDING_OUTCOMES, FINISH_REASONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from mesh.metrics.request_metrics import EmbeddingStatistics, Histogram, RequestStatistics
    from mesh.status import (
        BlocksStatus,
        EmbeddingModelStatus,
        FeatureStatus,
        HostStatus,
        KvDiskStatus,
        MeshStatus,
        ModelStatus,
        ProposerStatus,
        RecordingStatus,
        RoundTripStatus,
        SessionsStatus,
        SpeculationStatus,
        StageStatus,
        TuningStatus,
    )

_STEM = "mesh_spec_decode_num"
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
    status: MeshStatus
    """What `/mesh/status` says of it, with the stages' counters. Missing parts are left out."""


@dataclass(frozen=True)
class EmbeddingFigures:
    """Figures of one embedding model."""

    name: str
    """Model name for clients."""
    statistics: EmbeddingStatistics
    """Counts since it was loaded."""
    status: EmbeddingModelStatus
    """What `/mesh/status` says of it. Missing parts are left out."""


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))


def add_model(sheet: Sheet, status: ModelStatus) -> None:
    """Add samples of one model.

    Args:
        sheet: Samples of the scrape.
        status: The model's.
    """
    if status.ready is not None:
        sheet.gauge("mesh_ready", "1 while requests are answered at once, else 0.", int(status.ready))
    repairs = status.repairs
    sheet.counter("mesh_stage_losses", "Stages lost.", repairs.losses)
    sheet.counter("mesh_repairs", "Repairs of the ring.", repairs.count)
    sheet.counter("mesh_moves", "Moves of layers without a failure.", repairs.moves)
    if repairs.last_s is not None:
        sheet.gauge("mesh_last_repair_seconds", "Duration of the latest repair.", repairs.last_s)


def add_mesh(sheet: Sheet, status: MeshStatus) -> None:
    """Add samples of the mesh as a whole.

    Args:
        sheet: Samples of the scrape.
        status: The first model's.
    """
    if status.version:
        labels = {"version": status.version, "protocol_version": str(status.protocol_version)}
        sheet.gauge("mesh_info", "Versions of the software.", 1, **labels)
    states = [_state(host) for host in status.hosts]
    for state in ("serving", "spare", "joining", "leaving"):
        sheet.gauge("mesh_hosts", "Hosts by state.", states.count(state), state=state)
    num_copies = sum(len(host.copies) for host in status.hosts)
    sheet.gauge("mesh_spare_copies", "Replicas of stages that can take over at once.", num_copies)
    for host in status.hosts:
        sheet.gauge(
            "mesh_host_memory_bytes", "Memory of the host for the mesh.", host.memory_bytes, host=host.name
        )


def _state(host: HostStatus) -> str:
    if host.leaving:
        return "leaving"
    if not host.ready:
        return "joining"
    return "serving" if host.layers else "spare"


def add_requests(sheet: Sheet, statistics: RequestStatistics, sessions: SessionsStatus | None) -> None:
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
        sheet.gauge("mesh_num_requests_running", "Requests with a slot.", sessions.running)
        sheet.gauge("mesh_num_requests_waiting", "Requests that wait for a slot.", sessions.waiting)
        sheet.gauge("mesh_num_requests_paused", "Requests whose client does not read.", sessions.paused)
        sheet.gauge(
            "mesh_kv_cache_usage_perc",
            "Share of the KV caches' positions in use, 0 to 1.",
            sessions.positions / (sessions.slots * sessions.context),
        )


def add_ring(sheet: Sheet, stages: Sequence[StageStatus], round_trips: RoundTripStatus | None) -> None:
    """Add samples of the ring. A new ring counts from 0, as Prometheus expects after a restart.

    Args:
        sheet: Samples of the scrape.
        stages: In pipeline order.
        round_trips: None before the first ring.
    """
    for stage in stages:
        _add_stage(sheet, stage)
    if round_trips is not None:
        _add_links(sheet, stages, round_trips)


def _add_stage(sheet: Sheet, stage: StageStatus) -> None:
    start, stop = stage.layers
    labels = {"stage": str(stage.index), "host": stage.host, "layers": f"[{start}, {stop})"}
    sheet.counter("mesh_stage_windows", "Windows computed, chunks of prompts too.", stage.windows, **labels)
    sheet.counter("mesh_stage_compute_seconds", "Computing windows.", stage.compute_ms / 1000, **labels)
    sheet.counter(
        "mesh_stage_queue_seconds", "Windows waiting at the stage.", stage.queue_ms / 1000, **labels
    )
    if stage.rtt_ms is not None:
        sheet.gauge(
            "mesh_stage_rtt_seconds",
            "From the coordinator to the stage and back, the shortest of late.",
            stage.rtt_ms / 1000,
            **labels,
        )
    for add, name, help_, count in (
        (sheet.counter, "rows", "Rows computed.", stage.rows),
        (sheet.counter, "dropped_windows", "Void windows dropped.", stage.dropped_windows),
        (sheet.gauge, "queued_windows", "Windows that wait now.", stage.queued_windows),
        (sheet.gauge, "open_sessions", "Sessions that it knows.", stage.open_sessions),
        (sheet.gauge, "resident_memory_bytes", "In memory, mapped files included.", stage.resident_bytes),
    ):
        if count is not None:
            add(f"mesh_stage_{name}", help_, count, **labels)


def _add_links(sheet: Sheet, stages: Sequence[StageStatus], round_trips: RoundTripStatus) -> None:
    names = ["coordinator", *(f"stage {stage.index}" for stage in stages), "coordinator"]
    sent_bytes = [round_trips.sent_bytes, *(stage.sent_bytes for stage in stages)]
    sent_bytes[-1] = round_trips.received_bytes
    for (source, target), wire_ms, num_bytes in zip(
        pairwise(names), round_trips.wire_ms, sent_bytes, strict=True
    ):
        labels = {"source": source, "target": target}
        sheet.counter(
            "mesh_link_wire_seconds",
            "Windows that decode on their way over the link.",
            wire_ms / 1000,
            **labels,
        )
        sheet.counter("mesh_link_windows", "Those windows.", round_trips.windows, **labels)
        if num_bytes is not None:
            sheet.counter("mesh_link_sent_bytes", "Sent over the link.", num_bytes, **labels)


def add_kv_disk(sheet: Sheet, kv_disk: KvDiskStatus | None) -> None:
    """Add samples of the blocks on the stages' disks. A new ring counts its stages from 0.

    Args:
        sheet: Samples of the scrape.
        kv_disk: None where none are kept.
    """
    if kv_disk is None:
        return
    sheet.counter("mesh_kv_disk_hits", "Requests that began with tokens from disk.", kv_disk.fetched)
    sheet.counter("mesh_kv_disk_restored_tokens", "Those tokens.", kv_disk.fetched_tokens)
    sheet.counter(
        "mesh_kv_disk_failed_fetches",
        "Fetches that brought nothing, after which prompts were computed.",
        kv_disk.failed,
    )
    for index, stage in enumerate(kv_disk.stages):
        if stage is not None:
            _add_blocks(sheet, stage, {"stage": str(index)})


def _add_blocks(sheet: Sheet, stage: BlocksStatus, labels: dict[str, str]) -> None:
    sheet.gauge("mesh_kv_disk_files", "Block files of the stage.", stage.files, **labels)
    sheet.gauge("mesh_kv_disk_bytes", "Their size.", stage.bytes, **labels)
    for name, help_, count in (
        ("written", "Blocks written.", stage.written),
        ("left_out", "Blocks left out: the disk was behind, full or failing.", stage.left_out),
        ("damaged", "Damaged or foreign files, which were removed.", stage.damaged),
    ):
        sheet.counter(f"mesh_kv_disk_{name}", help_, count, **labels)


def add_recording(sheet: Sheet, recording: RecordingStatus | None) -> None:
    """Add samples of the recording of answers.

    Args:
        sheet: Samples of the scrape.
        recording: None where none are recorded.
    """
    if recording is None:
        return
    sheet.gauge("mesh_recording_answers", "Recorded answers in the folder.", recording.conversations)
    sheet.gauge("mesh_recording_tokens", "Their tokens.", recording.tokens)
    sheet.gauge("mesh_recording_bytes", "Their size.", recording.bytes)
    for name, help_, count in (
        ("written", "Answers recorded.", recording.written),
        ("left_out", "Answers left out: the disk was behind, full or failing.", recording.left_out),
        ("erased", "Answers erased, with their API key or by their age.", recording.erased),
    ):
        sheet.counter(f"mesh_recording_{name}", help_, count)


def add_tuning(sheet: Sheet, tuning: TuningStatus | None) -> None:
    """Add samples of tuning in the background.

    Args:
        sheet: Samples of the scrape.
        tuning: None where no drafter is tuned.
    """
    if tuning is None:
        return
    is_tuned, is_running = tuning.drafter is not None, tuning.state == "tuning"
    sheet.gauge("mesh_tuning_served", "1 while the group is served with a tuned drafter.", int(is_tuned))
    sheet.gauge("mesh_tuning_running", "1 while a drafter is tuned, and not paused.", int(is_running))
    sheet.gauge("mesh_tuning_new_tokens", "Tokens of answers since the latest training.", tuning.new_tokens)
    for name, help_, count in (
        ("chosen", "Tuned drafters chosen.", tuning.chosen),
        ("refused", "Tuned drafters refused, and trainings that failed.", tuning.refused),
        ("gone_back", "Returns to an earlier drafter.", tuning.gone_back),
    ):
        sheet.counter(f"mesh_tuning_{name}", help_, count)


def add_speculation(sheet: Sheet, speculation: SpeculationStatus | None) -> None:
    """Add samples of speculation.

    Args:
        sheet: Samples of the scrape.
        speculation: None before the first ring.
    """
    if speculation is None:
        return
    sheet.counter("mesh_windows", "Windows judged, chunks of prompts left out.", speculation.windows)
    sheet.counter("mesh_stale_rows", "Rows that a rejection voided on their way.", speculation.stale_rows)
    sheet.counter(
        "mesh_stale_rows_computed",
        "Those of them that all stages computed all the same.",
        speculation.stale_rows_computed,
    )
    sheet.counter(
        "mesh_recomputed_rows",
        "Rows of accepted tokens that were computed again, in models with recurrent layers.",
        speculation.recomputed_rows,
    )
    for name, proposer in speculation.proposers.items():
        for what, help_, count in (
            ("drafts", "Windows that proposed tokens.", proposer.drafts),
            ("draft_tokens", "Tokens proposed and verified.", proposer.drafted),
            ("accepted_tokens", "Those that the model chose too.", proposer.accepted),
        ):
            sheet.counter(f"{_STEM}_{what}", help_, count, proposer=name)
        for position, count in enumerate(proposer.accepted_per_position):
            sheet.counter(
                f"{_STEM}_accepted_tokens_per_pos",
                "By their place in the window.",
                count,
                proposer=name,
                position=str(position),
            )
        _add_depths(sheet, name, proposer)
    _add_features(sheet, speculation.features)
    rates = (("measured", speculation.measured_tokens_per_s), ("plain", speculation.plain_tokens_per_s))
    for kind, rate in rates:
        if rate is not None:
            sheet.gauge(
                "mesh_spec_decode_tokens_per_second",
                "Of the latest session: while it speculated, and what plain windows would bring.",
                rate,
                mode=kind,
            )


def _add_depths(sheet: Sheet, name: str, proposer: ProposerStatus) -> None:
    for what, meaning, counts in (
        (
            "drafted",
            "Tokens proposed, those of void windows too, by distance from the drafter's last feature.",
            proposer.drafted_per_depth,
        ),
        (
            "reached",
            "Those of them before which all tokens were accepted.",
            proposer.reached_per_depth,
        ),
        ("accepted", "Those of them that the model chose too.", proposer.accepted_per_depth),
    ):
        for depth, count in enumerate(counts or (), start=1):
            sheet.counter(f"{_STEM}_{what}_tokens_per_depth", meaning, count, proposer=name, depth=str(depth))


def _add_features(sheet: Sheet, features: FeatureStatus | None) -> None:
    if features is None:
        return
    for what, meaning, count in (
        ("wanted", "Positions whose hidden states a drafter or a recording asked for.", features.wanted),
        ("received", "Those of them whose hidden states arrived.", features.received),
        ("bytes", "Size of the hidden states that arrived.", features.bytes),
    ):
        sheet.counter(f"mesh_spec_decode_features_{what}", meaning, count)


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
        add_requests(sheet, model.statistics, status.sessions)
        add_speculation(sheet, status.speculation)
        add_ring(sheet, status.stages, status.round_trips)
        add_kv_disk(sheet, status.kv_disk)
        add_recording(sheet, status.recording)
        add_tuning(sheet, status.tuning)
        if status.prefix_mismatches is not None:
            sheet.counter(
                "mesh_prefix_mismatches",
                "Sessions that restarted because a slot did not hold the expected tokens.",
                status.prefix_mismatches,
            )
        add_model(sheet, status)
    for embedding in embedding_models:
        sheet.of(embedding.name)
        add_embeddings(sheet, embedding.statistics, embedding.status.embeddings.waiting)
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
