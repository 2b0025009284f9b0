"""What answers requests, as the API sees it: token ids in, committed token ids out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from stages.sampling.sampler import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from mesh.ring_times import RingTimes
    from mesh.speculation_report import SpeculationReport
    from stages.sampling.logprobs import TokenLogprobs


SpeculationMode = Literal["off", "ngram", "draft", "auto", "replay"]


@dataclass(frozen=True)
class SpeculationLimits:
    """How far one request may speculate: it narrows what the server was started with and never widens it.

    Attributes:
        mode: Who may propose, or None for whoever the server lets.
        max_width: Most proposed tokens in one window, or None for the server's bound.
        depth: Most windows in flight, or None for the server's bound.
    """

    mode: SpeculationMode | None = None
    max_width: int | None = None
    depth: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to continue.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: Stop after this many, with finish reason `length`.
        end_tokens: Stop after committing one of these, with finish reason `stop`; empty ignores them.
        sampling: How the tail draws.
        speculation: How far this request may speculate.
        prediction: What the client expects the answer to be, as token ids; it feeds proposers only.
        client: Whose request it is; where slots are short, clients take turns. None where nobody is told
            apart.
        history_key: Whose earlier answers may feed proposers; None for nobody's.
        uses_cache: Whether it may begin with tokens that earlier requests of the same client have left in
            the stages' caches.
        num_top_logprobs: How many likeliest tokens to report beside each committed one's logprob, up to
            `stages.sampling.logprobs.MAX_TOP_LOGPROBS`; None reports nothing.
        grammar: GBNF that the answer must match, from its first token on; None leaves it free.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    speculation: SpeculationLimits = field(default_factory=SpeculationLimits)
    prediction: tuple[int, ...] = ()
    client: str | None = None
    history_key: str | None = None
    uses_cache: bool = True
    num_top_logprobs: int | None = None
    grammar: str | None = None


@dataclass(frozen=True)
class GenerationStats:
    """Counts and times of one request so far.

    Attributes:
        num_cached: Tokens of the prompt that the stages held already.
        num_windows: Windows judged, prefill chunks left out.
        num_proposed: Proposed tokens that were verified.
        num_accepted: Proposed tokens that the target chose too.
        num_replays: How often it began again, as a stage was lost or its layers moved.
        prefill_ms: From the first window sent to the first token.
        decode_ms: From the first token to the latest.
        report: What speculation did, up to the moment of the call; None where nothing could be proposed.
        ring: Where the time went, up to the moment of the call; None where there are no stages.
    """

    num_cached: int = 0
    num_windows: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_replays: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    report: Callable[[], SpeculationReport] | None = field(default=None, compare=False, repr=False)
    ring: Callable[[], RingTimes] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Committed:
    """Tokens that became part of the answer together.

    Attributes:
        tokens: One or more ids; an end token, if it came, is the last of them.
        finish: Why the answer is over, or None while it goes on.
        stats: Counts and times up to here.
        logprobs: One entry for each token if the request asked for that, else none.
    """

    tokens: tuple[int, ...]
    finish: Literal["stop", "length"] | None
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] = ()


class Engine(Protocol):
    """The coordinator, or anything that can stand in for it."""

    @property
    def context_length(self) -> int:
        """Positions that one session may use, prompt and answer together."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """Continue the prompt. Closing the generator frees the session at every stage.

        Raises:
            ContextLengthExceeded: If prompt + 1 exceeds the context.
            Overloaded: If the waiting line has no place for it.
            StageFailed: If a stage failed or went away.
        """
