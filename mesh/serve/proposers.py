"""Proposers of requests, and the loading of the draft model."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from mesh.serve.preflight import latest_answer
from mesh.text.tokenizer import Tokenizer, num_shared_tokens
from spanmesh_proto.errors import InvalidModel
from speculative.draft.context import DraftUnusable
from speculative.draft.model import DraftModel
from speculative.lookup_proposers import Histories, NgramProposer, PredictionProposer, ReplayProposer
from stages.runtime.llama import last_complaint
from stages.runtime.numerics import numerics_for, prepare_process
from stages.sampling.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mesh.engine import GenerationRequest, SpeculationMode
    from mesh.serve.options import ServeOptions
    from mesh.serve.preflight import Preflight
    from speculative.draft.context import DraftOptions
    from speculative.proposer import Proposer


log = structlog.get_logger()


def load_draft(
    path: Path, target: Tokenizer, options: DraftOptions, *, clock_s: Callable[[], float]
) -> DraftModel:
    """A draft model that means by every token what the target means by it.

    Args:
        path: The GGUF.
        target: The vocabulary of the model that is served.
        options: How it drafts and computes.
        clock_s: Monotonic, seconds.

    Raises:
        InvalidModel: If it is not a GGUF, has another vocabulary or cannot draft.
        ClusterError: If this process computes in a numeric mode that the draft would disturb.
    """
    num_tokens = num_shared_tokens(Tokenizer(path).vocabulary(), target.vocabulary())
    prepare_process(numerics_for(exact=False, num_threads=options.num_threads))
    try:
        model = DraftModel(path, options, num_tokens=num_tokens, clock_s=clock_s)
    except DraftUnusable as error:
        raise InvalidModel(f"{error}; llama.cpp: {last_complaint()}") from error
    log.info("draft_loaded", draft=path.name, ms_per_token=round(model.draft_ms_per_token, 2))
    return model


class Proposers:
    """Gives each request its proposers, cheapest first.

    Args:
        mode: Who may propose.
        draft: The draft model, or None.
        replay_path: Recorded answers, of which the latest is replayed; or None.
        keeps_history: Whether earlier answers to the same API key are proposed again.
    """

    def __init__(
        self,
        mode: SpeculationMode,
        *,
        draft: DraftModel | None = None,
        replay_path: Path | None = None,
        keeps_history: bool = False,
    ) -> None:
        self._mode = mode
        self._draft = draft
        self._replay_path = replay_path
        self._histories = Histories() if keeps_history else None

    def __call__(self, request: GenerationRequest) -> list[Proposer]:
        """New proposers for one session; none if none may propose."""
        mode = narrower(self._mode, request.speculation.mode)
        proposers: list[Proposer] = []
        if mode == "replay" and self._replay_path is not None:
            proposers.append(ReplayProposer(latest_answer(self._replay_path)))
        if mode in {"auto", "ngram"}:
            if request.prediction:
                proposers.append(PredictionProposer(request.prediction))
            if self._histories is not None and request.history_key is not None:
                proposers.append(self._histories.open(request.history_key))
            proposers.append(NgramProposer())
        if mode in {"auto", "draft"} and self._draft is not None:
            # The target's own sampler and seed: what they draw differs only where they disagree.
            sampler = Sampler(request.sampling, len(request.prompt))
            proposers.append(self._draft.open(sampler.sample))
        return proposers


@contextmanager
def open_proposers(options: ServeOptions, known: Preflight) -> Iterator[Proposers | None]:
    """What the options ask for; None if nothing may be proposed.

    Raises:
        InvalidModel: If the draft has another vocabulary or cannot draft.
    """
    wanted = options.speculation
    if wanted.mode == "off":
        yield None
        return
    draft = None
    if wanted.needs_draft and wanted.draft_path is not None:
        limits = wanted.draft_options(ctx_size=known.workload.ctx_size, num_slots=known.workload.num_slots)
        draft = load_draft(wanted.draft_path, known.tokenizer, limits, clock_s=time.monotonic)
    try:
        yield Proposers(
            wanted.mode,
            draft=draft,
            replay_path=wanted.replay_path,
            keeps_history=wanted.keeps_history,
        )
    finally:
        if draft is not None:
            draft.close()


def narrower(server: SpeculationMode, wanted: SpeculationMode | None) -> SpeculationMode:
    """Who may propose when the server lets `server` and the request lets `wanted`."""
    if wanted is None or wanted in {"auto", server}:
        return server
    return wanted if server == "auto" else "off"
