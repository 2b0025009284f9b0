"""Rounds of drafts over a cut model, with verdicts by a script, so that each length of rollback occurs.

Stages and the drafter compute in this process; a session's text is the one that serving has, and several
sessions draft together.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from mesh.draft.loading import SETUP
from speculative.draft.context import DraftFile, DraftOptions, SlotRows
from speculative.draft.kinds import KINDS, load_context
from speculative.draft.worker import DraftSession, _choose, _Part
from speculative.proposer import FeatureReader
from stages.layers import LayerRange
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.source_model import read_source
from stages.slicing.stage_writer import write_stage
from tests.support.draft_oracle import Round

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.draft.drafter import Drafter
    from speculative.draft.context import DraftContext
    from speculative.draft.session import DraftSequence

# Fewer rows than attention computes in tiles.
_CHUNK: Final = 40


class CutModel:
    """A model in stages, all of them here, in exact mode.

    Args:
        path: The model.
        cuts: First layers of the stages behind the first one.
        folder: For the stages' files.
        layers: Layers whose outputs are features.
        num_slots: Sessions.
        ctx_size: Positions of each.
        kv_type: Format of their KV cache.
    """

    def __init__(
        self,
        path: Path,
        cuts: Sequence[int],
        folder: Path,
        layers: Sequence[int],
        *,
        num_slots: int,
        ctx_size: int,
        kv_type: str = "f16",
    ) -> None:
        source = read_source(path)
        edges = [0, *cuts, len(source.layers)]
        self._layers = tuple(layers)
        self._stages = []
        for start, stop in itertools.pairwise(edges):
            file = folder / f"{path.stem}-{start}-{stop}.gguf"
            write_stage(source, LayerRange(start, stop), file, lambda _count: None)
            runtime = StageRuntime(
                file,
                RuntimeOptions(
                    num_slots=num_slots, ctx_size=ctx_size, num_threads=1, exact=True, kv_type=kv_type
                ),
            )
            self._stages.append((runtime, runtime.tap_features(layers)))

    def features(self, slot: int, start: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens; returns their features, float32 (tokens, layers × n_embd)."""
        found = []
        for first in range(0, len(tokens), _CHUNK):
            some = tuple(tokens[first : first + _CHUNK])
            hidden = None
            taken: dict[int, NDArray[np.float32]] = {}
            for runtime, held in self._stages:
                span = Span(slot, start + first, list(some), hidden, 1 if runtime.info.is_tail else 0)
                hidden = runtime.decode([span], is_tapped=True)[0]
                found_here = zip(held, runtime.features(slot), strict=True)
                taken |= {layer: rows for layer, rows in found_here if rows is not None}
            found.append(np.concatenate([taken[layer] for layer in self._layers], axis=1))
        return np.concatenate(found)

    def trim(self, slot: int, num_tokens: int) -> None:
        """Keep only the first tokens of a slot."""
        for runtime, _ in self._stages:
            runtime.memory.trim(slot, num_tokens)

    def close(self) -> None:
        """Free all memory."""
        for runtime, _ in self._stages:
            runtime.close()


@dataclass(frozen=True)
class Script:
    """What is drafted, and what is accepted of it."""

    num_drafted: int
    """Tokens of a draft."""
    num_rounds: int
    """Rounds."""
    verdicts: str = "scripted"
    """`scripted`, or `all` to accept all drafted tokens."""
    p_min: float = 0.0
    """See `DraftOptions`."""

    def num_accepted(self, number: int, num_drafted: int) -> int:
        """How many drafted tokens are accepted, as draft_oracle.cpp has it."""
        if self.verdicts == "all":
            return num_drafted
        return (5 * number + number * number // 3) % (num_drafted + 1)

    def corrected(self, number: int, num_accepted: int, last: int, n_vocab: int) -> int:
        """The token behind accepted ones, as draft_oracle.cpp has it."""
        return (7 * number + 3 * num_accepted + last) % (n_vocab - 4) + 3


class _Line:
    """One session."""

    def __init__(self, slot: int, sequence: DraftSequence, text: Sequence[int]) -> None:
        self.slot = slot
        self.sequence = sequence
        self.session = DraftSession(sequence, lambda logits, _position, _before: int(np.argmax(logits)), None)
        self.text = list(text)
        self.rounds: list[Round] = []

    def read(self, model: CutModel, start: int) -> None:
        """Take the features of all tokens but the newest, from a position on."""
        assert isinstance(self.sequence, FeatureReader)
        self.sequence.take_features(start, model.features(self.slot, start, self.text[start:-1]))


def scripted_rounds(
    drafter: Drafter,
    path: Path,
    model: CutModel,
    texts: Sequence[Sequence[int]],
    script: Script,
    *,
    n_vocab: int,
    ctx_size: int,
    kv_type: str = "f16",
) -> list[list[Round]]:
    """Rounds of sessions that draft together.

    Args:
        drafter: The drafter.
        path: Its file, complete.
        model: The cut model.
        texts: Token ids of each session; the first draft follows the last of them.
        script: Drafts and verdicts.
        n_vocab: Token ids of the model.
        ctx_size: Positions of a session.
        kv_type: Format of the drafter's KV cache.
    """
    options = DraftOptions(
        draft_max=script.num_drafted,
        p_min=script.p_min,
        ctx_size=ctx_size,
        num_sessions=len(texts),
        kv_type=kv_type,
    )
    with contextlib.closing(
        load_context(DraftFile(drafter.kind, path, options, n_vocab, drafter.feature_width), SETUP)
    ) as context:
        lines = []
        for slot, text in enumerate(texts):
            sequence = KINDS[drafter.kind].sequence(drafter.kind.proposer, options, context)
            # Its answer never ends: what is drafted behind an end token counts, too.
            sequence._is_end = lambda _token: False
            line = _Line(slot, sequence, text)
            sequence.extend(text)
            line.read(model, 0)
            lines.append(line)
        for number in range(script.num_rounds):
            for line in lines:
                line.sequence.propose(script.num_drafted, ())
            _draft(context, lines)
            for line in lines:
                _judge(line, model, script, number, n_vocab)
        return [line.rounds for line in lines]


def _judge(line: _Line, model: CutModel, script: Script, number: int, n_vocab: int) -> None:
    drafted = line.sequence.propose(script.num_drafted, ()).tokens
    last, position = line.text[-1], len(line.text) - 1
    num_accepted = script.num_accepted(number, len(drafted))
    line.rounds.append(Round(position, last, drafted, num_accepted))
    # The window is computed whole, as stages do, and then goes back.
    rows = model.features(line.slot, position, (last, *drafted))[: 1 + num_accepted]
    model.trim(line.slot, position + 1 + num_accepted)
    corrected = script.corrected(number, num_accepted, last, n_vocab)
    committed = (*drafted[:num_accepted], corrected)
    line.text += committed
    assert isinstance(line.sequence, FeatureReader)
    line.sequence.extend(committed)
    line.sequence.take_features(position, rows)


def _draft(context: DraftContext, lines: Sequence[_Line]) -> None:
    """Compute until nothing is left to do."""
    for parts in _planned(lines):
        rows = [SlotRows(line.slot, part.span) for line, part in parts]
        outputs = context.decode(rows, contextlib.nullcontext())
        assert outputs is not None
        for (line, part), output in zip(parts, outputs, strict=True):
            tokens = () if output is None else _choose(part, output, context.num_tokens)
            line.sequence.computed(tokens, None if output is None else output.state)
            if line.session.error is not None:
                raise line.session.error


def _planned(lines: Sequence[_Line]) -> Iterator[list[tuple[_Line, _Part]]]:
    while True:
        spans = [(line, line.sequence.next_span(48)) for line in lines]
        parts = [(line, _Part(line.session, span)) for line, span in spans if span is not None]
        if not parts:
            return
        yield parts
