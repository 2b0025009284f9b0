"""Certification: a model cut into stages compared with the whole model, phase by phase.

Four phases, all in exact numeric mode. `prefill`: one batch of prompt rows. `decode`: one row at a time, each
the whole model's greedy choice. `chunks`: a longer prompt in several batches, past the model's sliding window
if it has one, where an error of windows shows. `spans`: several rows at once, as in verification, from
positions that had been passed before; not for models that cannot go back.

The whole model runs once; its hidden states at each cut are kept and compared with the first stage's output.
At last the model is cut at all those places at once, into the smallest stages. A model that cannot be cut is
compared with its single stage.
Smaller wire types are tried on the second stage alone: the first one is not affected.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidModel, UncuttableModel
from stages.certification.comparison import (
    CutResult,
    Difference,
    EquivalenceReport,
    compare,
    phases_of,
    wire_loss,
)
from stages.layers import LayerRange
from stages.runtime.stage_runtime import RuntimeOptions, Span, StageRuntime
from stages.slicing.source_model import read_source
from stages.slicing.stage_writer import write_stage
from stages.transport import hidden_codec
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from stages.certification.comparison import WireLoss
    from stages.graph_boundary import GraphBoundary
    from stages.slicing.source_model import SourceModel

PHASES: Final = ("prefill", "decode", "chunks", "spans")
# Phases with logits of every position.
_LOSS_PHASES: Final = ("prefill", "decode")
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


@dataclass(frozen=True)
class _Decode:
    """A decode of the whole model.

    Attributes:
        phase: One of `PHASES`.
        start: Position of the first row; 0 begins a new sequence.
        tokens: Token ids, one a row.
        logits: float32 (requested rows, n_vocab).
        hidden: By cut, float32 (rows, n_embd): output of the layer before it.
    """

    phase: str
    start: int
    tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    hidden: dict[int, NDArray[np.float32]]

    def span(self, hidden: NDArray[np.float32] | None = None) -> Span:
        """The same rows for a stage."""
        return Span(_SLOT, self.start, self.tokens, hidden, num_outputs=len(self.logits))


@dataclass(frozen=True)
class CertifyOptions:
    """Extent of a certification.

    Attributes:
        n_prompt: Rows of the prefill, at most 63.
        n_decode: Number of rows decoded one at a time.
        num_threads: Threads for computing.
        wires: Smaller wire types whose losses are measured.
    """

    n_prompt: int = 48
    n_decode: int = 24
    num_threads: int = 1
    wires: tuple[HiddenType, ...] = ()


def certify(
    model: Path,
    cuts: Sequence[int] | None = None,
    options: CertifyOptions | None = None,
    *,
    folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EquivalenceReport:
    """Cut a model in two at each of some layers, and compare with the whole model.

    Args:
        model: A whole model, a GGUF file.
        cuts: First layers of the second stage, each 1 to n_layers - 1; None for all places where the model
            can be cut in two, perhaps none.
        options: Extent of the comparison.
        folder: Folder for one stage file at a time; the system's temporary folder if None.
        progress: Called with the number of decodes done and of all decodes.

    Raises:
        InvalidModel: If llama.cpp cannot load the model or a stage of it, or results are not finite.
        UncuttableModel: If it has no such layer, or the outputs of its layers cannot be tapped.
        ClusterError: If exact mode is impossible in this process.
    """
    source = read_source(model)
    chosen = source.lone_cuts if cuts is None else tuple(cuts)
    for cut in chosen:
        if not 0 < cut < source.n_layers:
            raise UncuttableModel(
                f"{model.name} cannot be cut at {cut}: it has {source.n_layers} layers, "
                f"so cuts are 1 to {source.n_layers - 1}"
            )
        source.check_range(LayerRange(0, cut))
        source.check_range(LayerRange(cut, source.n_layers))
    if source.n_layers == 1:
        raise UncuttableModel(f"{model.name} has {source.n_layers} layers; there is nothing to cut")
    plan = _Plan(options or CertifyOptions(), _num_chunk_rows(source), not source.family.has_recurrent_state)
    runs_per_cut = 2 + len(plan.options.wires)
    # A single cut is all cuts at once.
    num_together = 0 if len(chosen) == 1 else len(chosen) + 1
    meter = _Meter(plan.num_decodes * (1 + runs_per_cut * len(chosen) + num_together), progress)
    decodes = []
    for decode in _run_whole(source, plan, chosen):
        decodes.append(decode)
        meter.step()
    with tempfile.TemporaryDirectory(prefix="spanmesh-certify-", dir=folder) as temporary:
        bench = _Bench(source, plan, Path(temporary), meter)
        results = tuple(bench.certify_cut(cut, decodes) for cut in chosen)
        together = bench.certify_together(chosen, decodes) if num_together else None
    return EquivalenceReport(
        model=model.name,
        architecture=source.header.architecture,
        n_layers=source.n_layers,
        cuts=results,
        together=together,
        rules=tuple(rule.name for rule in source.rules_used),
        is_known=source.is_known,
        refused_cuts=dict(source.refused_cuts),
    )


@dataclass(frozen=True)
class _Plan:
    options: CertifyOptions
    n_chunk_rows: int
    has_spans: bool

    @property
    def num_decodes(self) -> int:
        num_spans = len(_SPANS) if self.has_spans else 0
        return 1 + self.options.n_decode + len(range(0, self.n_chunk_rows, _CHUNK_ROWS)) + num_spans

    def runtime(
        self, observe_layers: tuple[int, ...] = (), observe_as: GraphBoundary | None = None
    ) -> RuntimeOptions:
        return RuntimeOptions(
            ctx_size=max(self.options.n_prompt + self.options.n_decode, self.n_chunk_rows),
            num_threads=self.options.num_threads,
            exact=True,
            observe_layers=observe_layers,
            observe_as=observe_as,
        )


def _num_chunk_rows(source: SourceModel) -> int:
    architecture = source.header.architecture
    window = source.header.integer(f"{architecture}.attention.sliding_window", 0)
    n_ctx_train = source.header.integer(f"{architecture}.context_length")
    rows = _CHUNKS * _CHUNK_ROWS
    if window <= _LONGEST_WINDOW:
        rows = max(rows, window + _CHUNK_ROWS)
    return min(rows, n_ctx_train)


def _run_whole(source: SourceModel, plan: _Plan, cuts: tuple[int, ...]) -> Iterator[_Decode]:
    model = source.header.path
    n_prompt, n_decode = plan.options.n_prompt, plan.options.n_decode
    boundary = source.family.entry.handover(source.header, LayerRange(0, source.n_layers))
    options = plan.runtime(tuple(cut - 1 for cut in cuts), boundary)
    with closing(StageRuntime(model, options)) as runtime:

        def run(phase: str, start: int, tokens: tuple[int, ...], num_outputs: int) -> _Decode:
            (logits,) = runtime.decode([Span(_SLOT, start, tokens, num_outputs=num_outputs)])
            if not np.isfinite(logits).all():
                raise InvalidModel(
                    f"{model.name} computes logits that are not finite; it cannot be certified"
                )
            # Padding rows of the runtime follow ours.
            hidden = {cut: runtime.observed(cut - 1)[: len(tokens)] for cut in cuts}
            return _Decode(phase, start, tokens, logits, hidden)

        noise = np.random.default_rng(_SEED)
        prompt = tuple(noise.integers(runtime.info.n_vocab, size=n_prompt).tolist())
        decode = run("prefill", 0, prompt, n_prompt)
        yield decode
        for position in range(n_prompt, n_prompt + n_decode):
            decode = run("decode", position, (int(decode.logits[-1].argmax()),), 1)
            yield decode
        long_prompt = noise.integers(runtime.info.n_vocab, size=plan.n_chunk_rows).tolist()
        for start in range(0, plan.n_chunk_rows, _CHUNK_ROWS):
            chunk = tuple(long_prompt[start : start + _CHUNK_ROWS])
            yield run("chunks", start, chunk, min(_LOGIT_ROWS_PER_CHUNK, len(chunk)))
        if plan.has_spans and runtime.info.can_trim:
            for offset, n_rows in _SPANS:
                span = tuple(noise.integers(runtime.info.n_vocab, size=n_rows).tolist())
                yield run("spans", plan.n_chunk_rows + offset, span, n_rows)


class _Meter:
    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def step(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(frozen=True)
class _Bench:
    """Cuts a model and runs its stages, one at a time."""

    source: SourceModel
    plan: _Plan
    folder: Path
    meter: _Meter

    def certify_cut(self, cut: int, decodes: Sequence[_Decode]) -> CutResult:
        first = self._run_stage(LayerRange(0, cut), [decode.span() for decode in decodes])
        wires = (HiddenType.F32, *self.plan.options.wires)
        onward = [
            decode.span(_carried(hidden, wire))
            for wire in wires
            for decode, hidden in zip(decodes, first, strict=True)
        ]
        logits_of_all = self._run_stage(LayerRange(cut, self.source.n_layers), onward)
        num = len(decodes)
        second, *lossy = (logits_of_all[start : start + num] for start in range(0, len(onward), num))
        differences: list[tuple[str, Difference]] = [
            (decode.phase, compare((decode.hidden[cut], hidden), (decode.logits, logits)))
            for decode, hidden, logits in zip(decodes, first, second, strict=True)
        ]
        losses = tuple(
            _loss(wire, decodes, logits) for wire, logits in zip(self.plan.options.wires, lossy, strict=True)
        )
        return CutResult(cut, phases_of(differences, PHASES), losses)

    def certify_together(self, cuts: Sequence[int], decodes: Sequence[_Decode]) -> Difference:
        """Cut at all these places at once; without any, the single stage of a whole model."""
        edges = (0, *sorted(cuts), self.source.n_layers)
        hidden: Sequence[NDArray[np.float32] | None] = [None] * len(decodes)
        for start, stop in pairwise(edges):
            spans = [decode.span(rows) for decode, rows in zip(decodes, hidden, strict=True)]
            hidden = self._run_stage(LayerRange(start, stop), spans)
        nothing = np.empty((0, 0), np.float32)
        differences = (
            compare((nothing, nothing), (decode.logits, logits))
            for decode, logits in zip(decodes, hidden, strict=True)
            if logits is not None
        )
        return sum(differences, Difference())

    def _run_stage(self, layers: LayerRange, spans: Sequence[Span]) -> list[NDArray[np.float32]]:
        path = self.folder / "stage.gguf"
        write_stage(self.source, layers, path, lambda _n_bytes: None)
        results = []
        with closing(StageRuntime(path, self.plan.runtime())) as runtime:
            for span in spans:
                results += runtime.decode([span])
                self.meter.step()
        path.unlink()
        return results


def _carried(hidden: NDArray[np.float32], wire: HiddenType) -> NDArray[np.float32]:
    """Hidden states after encoding and decoding, float32 (rows, n_embd)."""
    return hidden_codec.decode(hidden_codec.encode(hidden, wire), wire, hidden.shape[1])


def _loss(wire: HiddenType, decodes: Sequence[_Decode], logits: Sequence[NDArray[np.float32]]) -> WireLoss:
    pairs = [
        (decode.logits, cut)
        for decode, cut in zip(decodes, logits, strict=True)
        if decode.phase in _LOSS_PHASES
    ]
    whole, cut = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return wire_loss(wire, whole, cut)
