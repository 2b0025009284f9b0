"""Options of `mesh bench serve`, importable without the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from meshbench.http_client import EndpointName, Server
    from meshbench.serving_metrics import Slo


@dataclass(frozen=True)
class LoadOptions:
    """A run of `mesh bench serve`."""

    server: Server
    """The server."""
    endpoint: EndpointName
    """Where."""
    model: str | None
    """Name that requests give; None takes the first that the server lists."""
    api_key: str | None
    """Goes with each request, if there is one."""
    num_requests: int
    """Measured ones."""
    rate: float | None
    """Requests a second in an open loop; None makes a closed loop."""
    burstiness: float
    """See `load_generator.arrival_times_s`."""
    concurrency: int | None
    """Requests under way at once; None sets no limit in an open loop, and is 1 in a closed one."""
    num_warmup: int
    """Requests before those measured."""
    dataset: Path | None
    """File of prompts; None makes them up."""
    prompt_tokens: int
    """Of each prompt that is made up, about."""
    max_tokens: int
    """Of each answer."""
    temperature: float | None
    """Of sampling; None leaves it to the server."""
    ignore_eos: bool
    """Whether answers continue to the last token."""
    extra_body: dict[str, Any] | None
    """Further fields of each request."""
    seed: int
    """Of prompts, their order, and arrivals."""
    timeout_s: float
    """Limit of a request; a longer one counts as failed."""
    slos: tuple[Slo, ...]
    """Limits for goodput."""
    percentiles: tuple[float, ...]
    """Which, in [0, 100]."""
    output: Path | None
    """Folder for the report; None writes none."""

    @property
    def loop_name(self) -> str:
        """Description of the load."""
        if self.rate is None:
            return f"closed loop, {self.concurrency or 1} at once"
        limit = "" if self.concurrency is None else f", at most {self.concurrency} at once"
        return f"open loop, {self.rate:g} requests/s, burstiness {self.burstiness:g}{limit}"
