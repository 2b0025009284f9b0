"""Proposers for requests, and the loading of the draft model."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from mesh.coordinator.feature_needs import FeatureNeeds
from mesh.draft.completion import loadable_file
from mesh.draft.isolated_check import SETUP, check_isolated
from mesh.serve.preflight import latest_answer
from mesh.text.tokenizer import Tokenizer, num_shared_tokens
from spanmesh_proto.errors import InvalidModel, ModelError
from speculative.draft.context import DraftUnusable
from speculative.draft.feature_context import FeatureKind
from speculative.draft.feature_model import FeatureModel
from speculative.draft.model import DraftModel
from speculative.lookup_proposers import Histories, NgramProposer, PredictionProposer, ReplayProposer
from speculative.proposer import DrafterKind
from stages.gguf.reader import read_header
from stages.runtime.hidden_tap import TensorTap
from stages.sampling.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mesh.draft.drafter import Drafter
    from mesh.engine import GenerationRequest, SpeculationMode
    from mesh.options.host import HeadOptions
    from mesh.serve.preflight import Preflight
    from speculative.draft.context import DraftOptions
    from speculative.proposer import Proposer

log = structlog.get_logger()


class Proposers:
    """Factory of the proposers for each request, cheapest first.

    Args:
        mode: Proposers that are allowed.
        draft: The draft model, or None.
        feature_needs: Hidden states that it reads; None if it reads none.
        replay_path: File of recorded answers, of which the last is replayed; or None.
        replay_rates: See `speculative.lookup_proposers.ReplayProposer`.
        keeps_history: Whether earlier answers to the same API key are proposed again.
    """

    def __init__(
        self,
        mode: SpeculationMode,
        *,
        draft: DraftModel | FeatureModel | None = None,
        feature_needs: FeatureNeeds | None = None,
        replay_path: Path | None = None,
        replay_rates: tuple[float, ...] = (),
        keeps_history: bool = False,
    ) -> None:
        self._mode = mode
        self._draft = draft
        self.feature_needs = feature_needs
        self._replay_path = replay_path
        self._replay_rates = replay_rates
        self._histories = Histories() if keeps_history else None

    def __call__(self, request: GenerationRequest) -> list[Proposer]:
        """New proposers for one session; empty if none are allowed."""
        mode = narrower(self._mode, request.speculation.mode)
        proposers: list[Proposer] = []
        if mode == "replay" and self._replay_path is not None:
            proposers.append(ReplayProposer(latest_answer(self._replay_path), self._replay_rates))
        if mode in {"auto", "ngram"}:
            if request.prediction:
                proposers.append(PredictionProposer(request.prediction))
            if self._histories is not None and request.history_key is not None:
                proposers.append(self._histories.open(request.history_key))
            proposers.append(NgramProposer())
        if mode in {"auto", "draft"} and self._draft is not None and self._draft.is_alive:
            # The target's own sampler and seed: draft and target then sample differently only where they
            # disagree.
            sampler = Sampler(request.sampling, len(request.prompt))
            proposers.append(self._draft.open(sampler.sample, request.client))
        return proposers


def load_draft(
    path: Path, target: Tokenizer, options: DraftOptions, *, clock_s: Callable[[], float]
) -> DraftModel:
    """A draft model whose vocabulary is the target's, token by token.

    Args:
        path: The GGUF.
        target: Tokenizer of the served model.
        options: Options of the draft model.
        clock_s: Monotonic clock, seconds.

    Raises:
        InvalidModel: If it is not a GGUF, has another vocabulary or cannot draft.
    """
    read_header(path)
    # Before the vocabulary is read in this process: llama.cpp aborts on some.
    check_isolated(path, DrafterKind.MODEL, target.n_vocab)
    num_tokens = num_shared_tokens(Tokenizer(path).vocabulary(), target.vocabulary())
    try:
        model = DraftModel(path, options, num_tokens=num_tokens, clock_s=clock_s, setup=SETUP)
    except DraftUnusable as error:
        raise InvalidModel(str(error)) from error
    log.info("draft_loaded", draft=path.name, ms_per_token=round(model.draft_ms_per_token, 2))
    return model


def load_feature_drafter(
    drafter: Drafter,
    target_path: Path,
    target: Tokenizer,
    options: DraftOptions,
    *,
    clock_s: Callable[[], float],
) -> FeatureModel:
    """A drafter that reads hidden states of the served model.

    Args:
        drafter: The drafter.
        target_path: The served model.
        target: Its tokenizer.
        options: Options of the draft model.
        clock_s: Monotonic clock, seconds.

    Raises:
        InvalidModel: If it has another vocabulary or cannot draft.
        ModelError: If its file cannot be completed.
    """
    path = loadable_file(drafter, target_path)
    check_isolated(path, drafter.kind, target.n_vocab)
    num_tokens = num_shared_tokens(Tokenizer(path).vocabulary(), target.vocabulary())
    kind = FeatureKind(drafter.kind.value)
    try:
        model = FeatureModel(
            path,
            kind,
            options,
            num_tokens=num_tokens,
            make_tap=TensorTap,
            clock_s=clock_s,
            setup=SETUP,
        )
    except DraftUnusable as error:
        raise InvalidModel(str(error)) from error
    log.info(
        "draft_loaded",
        draft=drafter.path.name,
        kind=kind.value,
        layers=drafter.layers,
        ms_per_token=round(model.draft_ms_per_token, 2),
    )
    return model


@contextmanager
def open_proposers(options: HeadOptions, known: Preflight) -> Iterator[Proposers | None]:
    """Proposers as the options ask for; None for plain decoding.

    Raises:
        InvalidModel: If the draft has another vocabulary or cannot draft.
    """
    wanted = options
    if wanted.speculate == "off":
        yield None
        return
    draft, needs = _loaded(options, known)
    try:
        yield Proposers(
            wanted.speculate,
            draft=draft,
            feature_needs=needs,
            replay_path=wanted.replay_path,
            replay_rates=wanted.replay_rates,
            keeps_history=wanted.keeps_history,
        )
    finally:
        if draft is not None:
            draft.close()


def _loaded(
    options: HeadOptions, known: Preflight
) -> tuple[DraftModel | FeatureModel | None, FeatureNeeds | None]:
    """The drafter, and hidden states that it reads; a model whose own head cannot draft is served without."""
    wanted, drafter = options, known.drafter
    if drafter is None:
        return None, None
    limits = wanted.draft_options(known.draft_ctx_size)
    if not drafter.reads_features:
        return load_draft(drafter.path, known.tokenizer, limits, clock_s=time.monotonic), None
    try:
        draft = load_feature_drafter(drafter, options.model, known.tokenizer, limits, clock_s=time.monotonic)
    except ModelError as error:
        if wanted.draft_path is not None or wanted.speculate == "draft":
            raise
        log.warning("draft_head_unusable", reason=error.message)
        return None, None
    needs = FeatureNeeds(
        drafter.layers,
        known.model.n_layers,
        drafter.n_embd,
        wanted.feature_type,
        wanted.draft_context,
    )
    return draft, needs


def narrower(server: SpeculationMode, wanted: SpeculationMode | None) -> SpeculationMode:
    """The mode that both server and request allow."""
    if wanted is None or wanted in {"auto", server}:
        return server
    return wanted if server == "auto" else "off"
