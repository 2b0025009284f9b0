"""Reference of a certification: what the whole model computes, phase by phase.

Five phases, all in exact numeric mode. `prefill`: one batch of prompt rows. `decode`: one row at a time, each
the whole model's greedy choice. `chunks`: a longer prompt in several batches, past the model's sliding window
if it has one, where an error of windows shows. `spans`: several rows at once, as in verification, from
positions that had been passed before. `windows`, for models with recurrent layers only: the reference
computes rows one by one, and the stages must compute the same rows at once, up to the most of a window.

Models with recurrent layers go back to checkpoints. The reference of their spans never goes back: it computes
the same rows in the same batches from position 0 on, so that a state that a checkpoint restores badly shows.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidModel
from stages.layers import LayerRange
from stages.runtime.numerics import EXACT_MAX_ROWS
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from stages.graph_boundary import GraphBoundary
    from stages.slicing.source_model import SourceModel

PHASES: Final = ("prefill", "decode", "chunks", "spans", "windows")
# In models with recurrent layers these decide whether sessions may go back to checkpoints.
PHASES_OF_CHECKPOINTS: Final = ("spans", "windows")
_SLOT: Final = 0
_SEED: Final = 20_240_613
_CHUNK_ROWS: Final = 40
_CHUNKS: Final = 2
# A row of logits of a large vocabulary is 1 MB: of each chunk, only these last rows are compared.
_LOGIT_ROWS_PER_CHUNK: Final = 2
# Starts of spans before the end of the long prompt, and numbers of rows: the second goes back.
_SPANS: Final = ((-12, 6), (-9, 4), (-5, 1))
# Longer windows would take too long to fill.
_LONGEST_WINDOW: Final = 2048
# With recurrent layers: a span goes back to a checkpoint and ends so far before the end of the long prompt;
# two more follow it. Then the session goes back behind the first, computes some rows again, and goes on.
_BEFORE_END: Final = 12
_SECOND_ROWS, _THIRD_ROWS = 6, 3
_AGAIN_ROWS, _OTHER_ROWS = 3, 4
# At last it goes back to before the first.
_LAST_ROWS: Final = 5
_CHECKPOINT_SPANS: Final = 5
_MOST_CHECKPOINTS: Final = 3
# Rows at once that are compared with rows one by one.
_WIDTHS: Final = (2, 5, 16, EXACT_MAX_ROWS)


@dataclass(frozen=True)
class ReferenceDecode:
    """Rows that the stages compute in one decode, and the whole model's results."""

    phase: str
    """One of `PHASES`."""
    start: int
    """Position of the first row; 0 begins a new sequence."""
    tokens: tuple[int, ...]
    """Token ids, one a row."""
    logits: NDArray[np.float32]
    """float32 (requested rows, n_vocab)."""
    hidden: dict[int, NDArray[np.float32]]
    """By cut, float32 (rows, n_embd): output of the layer before it."""
    checkpoints: tuple[int, ...] = ()
    """Checkpoints that the stages keep from here on, see `Span`."""

    def span(self, hidden: NDArray[np.float32] | None = None) -> Span:
        """The same rows for a stage."""
        return Span(
            _SLOT,
            self.start,
            self.tokens,
            hidden,
            num_outputs=len(self.logits),
            checkpoints=self.checkpoints,
        )


@dataclass(frozen=True)
class ReferencePlan:
    """Computed rows."""

    n_prompt: int
    """Rows of the prefill."""
    n_decode: int
    """Number of rows decoded one at a time."""
    num_threads: int
    """Threads for computing."""
    n_chunk_rows: int
    """Rows of the long prompt."""
    is_recurrent: bool
    """Whether the model has recurrent layers, and goes back to checkpoints."""

    @classmethod
    def of(cls, source: SourceModel, *, n_prompt: int, n_decode: int, num_threads: int) -> ReferencePlan:
        """The plan for a model; arguments as the attributes."""
        architecture = source.header.architecture
        window = source.header.integer(f"{architecture}.attention.sliding_window", 0)
        n_ctx_train = source.header.integer(f"{architecture}.context_length")
        rows = _CHUNKS * _CHUNK_ROWS
        if window <= _LONGEST_WINDOW:
            rows = max(rows, window + _CHUNK_ROWS)
        return cls(n_prompt, n_decode, num_threads, min(rows, n_ctx_train), source.family.has_recurrent_state)

    @property
    def num_decodes(self) -> int:
        """Decodes of each stage."""
        num_back = _CHECKPOINT_SPANS + len(_WIDTHS) if self.is_recurrent else len(_SPANS)
        return 1 + self.n_decode + len(self.chunk_starts) + num_back

    @property
    def chunk_starts(self) -> range:
        """Positions at which chunks of the long prompt begin."""
        return range(0, self.n_chunk_rows, _CHUNK_ROWS)

    @property
    def return_point(self) -> int:
        """Position of the checkpoint in the long prompt: its last chunk with room for spans behind."""
        last = self.n_chunk_rows - _BEFORE_END
        return max((start for start in self.chunk_starts if start < last), default=0)

    def runtime(
        self, observe_layers: tuple[int, ...] = (), observe_as: GraphBoundary | None = None
    ) -> RuntimeOptions:
        """Options of every runtime.

        Args:
            observe_layers: See `RuntimeOptions`.
            observe_as: See `RuntimeOptions`.
        """
        rows = max(self.n_prompt + self.n_decode, self.n_chunk_rows)
        return RuntimeOptions(
            ctx_size=max(rows, sum(_WIDTHS)) if self.is_recurrent else rows,
            num_threads=self.num_threads,
            exact=True,
            observe_layers=observe_layers,
            observe_as=observe_as,
            num_checkpoints=_MOST_CHECKPOINTS if self.is_recurrent else 0,
        )


@dataclass(frozen=True)
class _CheckpointRows:
    """Token ids of the spans in `_checkpoint_spans`."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    third: tuple[int, ...]
    other: tuple[int, ...]
    last: tuple[int, ...]


@dataclass(frozen=True)
class _Whole:
    """The whole model."""

    runtime: StageRuntime
    """The loaded model."""
    cuts: tuple[int, ...]
    """Where hidden states are taken."""
    name: str
    """Its name, for errors."""

    def begin_with(self, batches: Sequence[tuple[int, ...]]) -> None:
        """Begin a new sequence, and compute batches of token ids."""
        self.runtime.memory.trim(_SLOT, 0)
        start = 0
        for tokens in batches:
            self._run(start, tokens, 0)
            start += len(tokens)

    def decode(
        self,
        phase: str,
        start: int,
        tokens: tuple[int, ...],
        num_outputs: int,
        checkpoints: tuple[int, ...] = (),
    ) -> ReferenceDecode:
        """Compute rows at once.

        Args:
            phase: One of `PHASES`.
            start: Position of the first row.
            tokens: Token ids, one a row.
            num_outputs: Number of last rows whose logits are compared.
            checkpoints: Those that the stages keep.

        Raises:
            InvalidModel: If logits are not finite.
        """
        # All rows are marked as outputs: a head that does not gather the marked ones shows at the stages.
        logits, hidden = self._run(start, tokens, len(tokens))
        return ReferenceDecode(
            phase, start, tokens, logits[len(tokens) - num_outputs :].copy(), hidden, checkpoints
        )

    def decode_one_by_one(self, phase: str, start: int, tokens: tuple[int, ...]) -> ReferenceDecode:
        """Compute rows one by one which the stages compute at once; all logits are compared.

        Args:
            phase: One of `PHASES`.
            start: Position of the first row.
            tokens: Token ids, one a row.

        Raises:
            InvalidModel: If logits are not finite.
        """
        rows = [self._run(start + index, (token,), 1) for index, token in enumerate(tokens)]
        return ReferenceDecode(
            phase,
            start,
            tokens,
            np.concatenate([logits for logits, _ in rows]),
            {cut: np.concatenate([hidden[cut] for _, hidden in rows]) for cut in self.cuts},
        )

    def _run(
        self, start: int, tokens: tuple[int, ...], num_outputs: int
    ) -> tuple[NDArray[np.float32], dict[int, NDArray[np.float32]]]:
        (logits,) = self.runtime.decode([Span(_SLOT, start, tokens, num_outputs=num_outputs)])
        if not np.isfinite(logits).all():
            raise InvalidModel(f"{self.name} computes logits that are not finite; it cannot be certified")
        # Padding rows of the runtime follow ours.
        return logits, {cut: self.runtime.observed(cut - 1)[: len(tokens)] for cut in self.cuts}


def run_whole(source: SourceModel, plan: ReferencePlan, cuts: tuple[int, ...]) -> Iterator[ReferenceDecode]:
    """Run the whole model.

    Args:
        source: The model.
        plan: Computed rows.
        cuts: Where hidden states are taken.

    Raises:
        InvalidModel: If llama.cpp cannot load it, or results are not finite.
        UncuttableModel: If the outputs of its layers cannot be tapped.
        ClusterError: If exact mode is impossible in this process.
    """
    boundary = source.family.entry.handover(source.header, LayerRange(0, source.n_layers))
    options = plan.runtime(tuple(cut - 1 for cut in cuts), boundary)
    with closing(StageRuntime(source.header.path, options)) as runtime:
        whole = _Whole(runtime, cuts, source.header.path.name)
        noise = np.random.default_rng(_SEED)

        def random_tokens(num_rows: int) -> tuple[int, ...]:
            return tuple(noise.integers(runtime.info.n_vocab, size=num_rows).tolist())

        decode = whole.decode("prefill", 0, random_tokens(plan.n_prompt), plan.n_prompt)
        yield decode
        for position in range(plan.n_prompt, plan.n_prompt + plan.n_decode):
            decode = whole.decode("decode", position, (int(decode.logits[-1].argmax()),), 1)
            yield decode
        prompt = random_tokens(plan.n_chunk_rows)
        for start in plan.chunk_starts:
            keeps = plan.is_recurrent and start == plan.return_point
            chunk = prompt[start : start + _CHUNK_ROWS]
            num_outputs = min(_LOGIT_ROWS_PER_CHUNK, len(chunk))
            yield whole.decode("chunks", start, chunk, num_outputs, (start,) if keeps else ())
        if plan.is_recurrent:
            end = plan.n_chunk_rows - _BEFORE_END
            yield from _checkpoint_spans(
                whole,
                prompt[: plan.return_point],
                _CheckpointRows(
                    random_tokens(end - plan.return_point),
                    random_tokens(_SECOND_ROWS),
                    random_tokens(_THIRD_ROWS),
                    random_tokens(_OTHER_ROWS),
                    random_tokens(_LAST_ROWS),
                ),
            )
            tokens = random_tokens(sum(_WIDTHS))
            for start, stop in pairwise((0, *accumulate(_WIDTHS))):
                yield whole.decode_one_by_one("windows", start, tokens[start:stop])
        elif runtime.info.can_trim:
            for offset, num_rows in _SPANS:
                start = plan.n_chunk_rows + offset
                yield whole.decode("spans", start, random_tokens(num_rows), num_rows)


def _checkpoint_spans(
    whole: _Whole, before: tuple[int, ...], rows: _CheckpointRows
) -> Iterator[ReferenceDecode]:
    """Spans for which the stages, but not the reference, go back to checkpoints.

    Args:
        whole: The whole model.
        before: Token ids before the earliest checkpoint.
        rows: Those of the spans.
    """
    point, end = len(before), len(before) + len(rows.first)
    chunks = [before[start : start + _CHUNK_ROWS] for start in range(0, point, _CHUNK_ROWS)]
    num_outputs = min(_LOGIT_ROWS_PER_CHUNK, len(rows.first))
    whole.begin_with(chunks)
    # Back from the end of the long prompt.
    yield whole.decode("spans", point, rows.first, num_outputs, (point,))
    yield whole.decode("spans", end, rows.second, len(rows.second), (point, end))
    further = end + len(rows.second)
    yield whole.decode("spans", further, rows.third, len(rows.third), (point, end, further))
    # Rejected: back from the end of the third to the start of the second.
    whole.begin_with([*chunks, rows.first])
    again = (*rows.second[:_AGAIN_ROWS], *rows.other)
    yield whole.decode("spans", end, again, len(again), (point, end))
    whole.begin_with(chunks)
    yield whole.decode("spans", point, rows.last, len(rows.last), (point,))
