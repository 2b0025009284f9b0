"""Samples of requests: how many, how long, how many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh.metrics.request_statistics import FINISH_REASONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.metrics.request_statistics import RequestStatistics
    from mesh.metrics.sheet import Sheet


def add_requests(sheet: Sheet, statistics: RequestStatistics, sessions: Mapping[str, Any] | None) -> None:
    """Add them.

    Args:
        sheet: What is scraped.
        statistics: Since the server started.
        sessions: `sessions` of the status; None while no ring was ever up.
    """
    for name, help_, histogram in (
        ("time_to_first_token", "From asking to the first token.", statistics.time_to_first_token_s),
        ("inter_token_latency", "From one token to the next.", statistics.inter_token_s),
        ("e2e_request_latency", "From asking to the last token.", statistics.whole_s),
        ("request_queue_time", "Waiting for a slot, or for a repair.", statistics.queue_s),
        ("request_prefill_time", "From the first window to the first token.", statistics.prefill_s),
        ("request_decode_time", "From the first token to the last.", statistics.decode_s),
    ):
        sheet.histogram(f"mesh_{name}_seconds", help_, histogram)
    sheet.counter("mesh_prompt_tokens", "Tokens of prompts.", statistics.num_prompt_tokens)
    sheet.counter("mesh_generation_tokens", "Tokens of answers.", statistics.num_generated_tokens)
    sheet.counter("mesh_prefix_cache_queries", "Tokens of prompts looked up.", statistics.num_cache_queries)
    sheet.counter("mesh_prefix_cache_hits", "Those that the stages held.", statistics.num_cache_hits)
    sheet.counter(
        "mesh_request_replays", "Sessions that began again in another ring.", statistics.num_replays
    )
    for reason in FINISH_REASONS:
        sheet.counter(
            "mesh_request_success",
            "Requests that ended.",
            statistics.finished[reason],
            finished_reason=reason,
        )
    if sessions is not None:
        sheet.gauge("mesh_num_requests_running", "Requests that have a slot.", sessions["running"])
        sheet.gauge("mesh_num_requests_waiting", "Requests that wait for one.", sessions["waiting"])
        sheet.gauge("mesh_num_requests_paused", "Requests whose client does not read.", sessions["paused"])
        room = sessions["slots"] * sessions["context"]
        sheet.gauge(
            "mesh_kv_cache_usage_perc", "Share of the KV caches' positions in use, 0 to 1.",
            sessions["positions"] / room,
        )  # fmt: skip
