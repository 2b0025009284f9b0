"""Proposers for requests, and the drafter that the options ask for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from mesh.coordinator.feature_store import FeatureNeeds
from mesh.draft.assistant_trial import try_assistant
from mesh.draft.loading import load_drafter
from mesh.serve.group_drafter import GroupDrafter
from mesh.serve.preflight import latest_answer
from spanmesh_proto.errors import ModelError
from speculative.lookup_proposers import (
    Histories,
    NgramProposer,
    PredictionProposer,
    RatedAnswer,
    ReplayProposer,
)
from speculative.remote_drafts import RemoteDrafter, RemoteDraftProposer
from stages.sampling.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mesh.engine import GenerationRequest, SpeculationMode
    from mesh.options.host import HeadOptions
    from mesh.serve.preflight import Preflight
    from speculative.draft.worker import LoadedDrafter
    from speculative.proposer import Proposer, Replace

log = structlog.get_logger()


class Proposers:
    """Factory of the proposers for each request, cheapest first.

    Args:
        mode: Proposers that are allowed.
        draft: The drafter, or None.
        group: A group of API keys with a drafter of its own, which takes the place of `draft` there; None
            without one.
        feature_needs: Hidden states that it reads; None if it reads none.
        assistant: The one that drafts beside the last stage; None without one.
        replay_path: File of recorded answers, of which the last is replayed; or None.
        replay_rates: See `speculative.lookup_proposers.RatedAnswer`. A drafter of blocks and an
            assistant compute all the same, and their drafts are replaced; other such drafts take no time.
        keeps_history: Whether earlier answers to the same API key are proposed again.
    """

    def __init__(
        self,
        mode: SpeculationMode,
        *,
        draft: LoadedDrafter | None = None,
        group: GroupDrafter | None = None,
        feature_needs: FeatureNeeds | None = None,
        assistant: RemoteDrafter | None = None,
        replay_path: Path | None = None,
        replay_rates: tuple[float, ...] = (),
        keeps_history: bool = False,
    ) -> None:
        self._mode = mode
        self._draft = draft
        self.group = group
        self.feature_needs = feature_needs
        self.assistant = assistant
        self._replay_path = replay_path
        self._replay_rates = replay_rates
        self._histories = Histories() if keeps_history else None

    def __call__(self, request: GenerationRequest) -> list[Proposer]:
        """New proposers for one session; empty if none are allowed."""
        mode = narrower(self._mode, request.speculation.mode)
        proposers: list[Proposer] = []
        replace: Replace | None = None
        if mode == "replay" and self._replay_path is not None:
            answer = latest_answer(self._replay_path)
            drafts_blocks = self._draft is not None and self._draft.drafts_blocks
            if self._replay_rates and (drafts_blocks or self.assistant is not None):
                replace = RatedAnswer(answer, self._replay_rates, num_before=len(request.prompt)).behind
            else:
                proposers.append(ReplayProposer(answer, self._replay_rates))
        if mode in {"auto", "ngram"}:
            if request.prediction:
                proposers.append(PredictionProposer(request.prediction))
            if self._histories is not None and request.history_key is not None:
                proposers.append(self._histories.open(request.history_key))
            proposers.append(NgramProposer())
        draft = self._draft if mode in {"auto", "draft"} or replace is not None else None
        if draft is not None and not request.has_rows:
            # The target's own sampler and seed: draft and target then sample differently only where they
            # disagree.
            choose = Sampler(request.sampling, len(request.prompt)).sample
            if self.group is not None and self.group.is_of(request):
                opened = self.group.open(choose, request.client, replace)
            else:
                opened = draft.open(choose, request.client, replace) if draft.is_alive else None
            if opened is not None:
                proposers.append(opened)
        if self.assistant is not None and (mode in {"auto", "draft"} or replace is not None):
            proposers.append(RemoteDraftProposer(self.assistant, replace))
        return proposers


@contextmanager
def open_proposers(
    options: HeadOptions,
    known: Preflight,
    is_member: Callable[[GenerationRequest], bool] | None = None,
) -> Iterator[Proposers | None]:
    """Proposers as the options ask for; None for plain decoding.

    Args:
        options: Options of the model.
        known: Results of the checks before the start.
        is_member: Whether a request is of the group with a drafter of its own; None without one.

    Raises:
        InvalidModel: If the draft has another vocabulary or cannot draft.
    """
    if options.speculate == "off":
        yield None
        return
    assistant = _assistant(options, known)
    draft, needs = _loaded(options, known) if assistant is None else (None, None)
    group = None if draft is None or is_member is None else GroupDrafter(draft, is_member)
    try:
        yield Proposers(
            options.speculate,
            draft=draft,
            group=group,
            feature_needs=needs,
            assistant=assistant,
            replay_path=options.replay_path,
            replay_rates=options.replay_rates,
            keeps_history=options.keeps_history,
        )
    finally:
        if group is not None:
            group.close()
        if draft is not None:
            draft.close()


def _assistant(options: HeadOptions, known: Preflight) -> RemoteDrafter | None:
    """The assistant, tried out on this host; None if the drafter is none.

    Raises:
        InvalidModel: If it cannot draft.
    """
    drafter = known.drafter
    if drafter is None or not drafter.is_beside_tail:
        return None
    ms_per_token = try_assistant(drafter.path, options.model)
    log.info("assistant_tried", draft=drafter.path.name, ms_per_token=round(ms_per_token, 2))
    return RemoteDrafter(options.draft_max, draft_min=options.draft_min, p_min=options.p_min)


def _loaded(options: HeadOptions, known: Preflight) -> tuple[LoadedDrafter | None, FeatureNeeds | None]:
    """The drafter, and hidden states that it reads; a model whose own head cannot draft is served without."""
    drafter = known.drafter
    if drafter is None:
        return None, None
    try:
        draft = load_drafter(drafter, known.tokenizer, options.draft_options(known.draft_ctx_size))
    except ModelError as error:
        if options.draft_path is not None or options.speculate == "draft":
            raise
        log.warning("draft_head_unusable", reason=error.message)
        return None, None
    log.info(
        "draft_loaded",
        draft=drafter.path.name,
        ms_per_token=round(draft.draft_ms_per_token, 2),
        **({"kind": drafter.kind.value, "layers": drafter.layers} if drafter.reads_features else {}),
    )
    if not drafter.reads_features:
        return draft, None
    return draft, FeatureNeeds(
        drafter.layers,
        known.model.n_layers,
        drafter.n_embd,
        options.feature_type(len(drafter.layers)),
        options.draft_context,
    )


def narrower(server: SpeculationMode, wanted: SpeculationMode | None) -> SpeculationMode:
    """The mode that both server and request allow."""
    if wanted is None or wanted in {"auto", server}:
        return server
    return wanted if server == "auto" else "off"
