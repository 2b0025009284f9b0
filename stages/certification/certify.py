"""Certification: a cut model compared with the whole one, phase by phase, also in a child process.

The whole model runs once, see `reference`; its hidden states at each cut are kept and compared with the first
stage's output. At last the model is cut at all those places at once, into the smallest stages. A model that
cannot be cut is compared with its single stage. Smaller wire types are tried on the second stage alone: the
first one is not affected.

The output of a child process goes to a file, whose last line gives the reason if llama.cpp aborted.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from spanmesh_proto.errors import ModelError, UncuttableModel
from stages.certification.comparison import CutResult, EquivalenceReport, compare, phases_of, total, wire_loss
from stages.certification.reference import PHASES, PHASES_OF_CHECKPOINTS, ReferencePlan, run_whole
from stages.isolated import ProcessEnded, call
from stages.layers import LayerRange, cuts_of
from stages.runtime.stage_runtime import StageRuntime
from stages.slicing.layout import lay_out
from stages.slicing.source_model import read_source
from stages.slicing.stage_writer import ByteCounter, stage_bytes, with_shared_blocks, write_stage
from stages.transport import hidden_codec
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from stages.certification.comparison import Difference, PhaseResult, WireLoss
    from stages.certification.reference import ReferenceDecode
    from stages.runtime.spans import Span
    from stages.slicing.source_model import SourceModel

# Phases with logits of every position.
_LOSS_PHASES: Final = ("prefill", "decode")
_OUTPUT: Final = "output.txt"
log = structlog.get_logger()


@dataclass(frozen=True)
class CertifyOptions:
    """Extent of a certification."""

    n_prompt: int = 48
    """Rows of the prefill, at most 63."""
    n_decode: int = 24
    """Number of rows decoded one at a time."""
    num_threads: int = 1
    """Threads for computing."""
    wires: tuple[HiddenType, ...] = ()
    """Smaller wire types whose losses are measured."""


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
    plan: ReferencePlan
    wires: tuple[HiddenType, ...]
    folder: Path
    meter: _Meter

    def certify_cut(self, cut: int, decodes: Sequence[ReferenceDecode]) -> CutResult:
        first = self._run_stage(LayerRange(0, cut), [decode.span() for decode in decodes])
        wires = (HiddenType.F32, *self.wires)
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
        losses = tuple(_loss(wire, decodes, logits) for wire, logits in zip(self.wires, lossy, strict=True))
        return CutResult(cut, phases_of(differences, PHASES), losses)

    def certify_together(
        self, cuts: Sequence[int], decodes: Sequence[ReferenceDecode]
    ) -> tuple[PhaseResult, ...]:
        """Cut at all these places at once; without any, the single stage of a whole model."""
        edges = (0, *sorted(cuts), self.source.n_layers)
        hidden: Sequence[NDArray[np.float32] | None] = [None] * len(decodes)
        for start, stop in pairwise(edges):
            spans = [decode.span(rows) for decode, rows in zip(decodes, hidden, strict=True)]
            hidden = self._run_stage(LayerRange(start, stop), spans)
        nothing = np.empty((0, 0), np.float32)
        differences = [
            (decode.phase, compare((nothing, nothing), (decode.logits, logits)))
            for decode, logits in zip(decodes, hidden, strict=True)
            if logits is not None
        ]
        return phases_of(differences, PHASES)

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
    options = options or CertifyOptions()
    plan = ReferencePlan.of(
        source, n_prompt=options.n_prompt, n_decode=options.n_decode, num_threads=options.num_threads
    )
    runs_per_cut = 2 + len(options.wires)
    # A single cut is all cuts at once.
    num_together = 0 if len(chosen) == 1 else len(chosen) + 1
    meter = _Meter(plan.num_decodes * (1 + runs_per_cut * len(chosen) + num_together), progress)
    decodes = []
    for decode in run_whole(source, plan, chosen):
        decodes.append(decode)
        meter.step()
    with tempfile.TemporaryDirectory(prefix="spanmesh-certify-", dir=folder) as temporary:
        bench = _Bench(source, plan, options.wires, Path(temporary), meter)
        results = tuple(bench.certify_cut(cut, decodes) for cut in chosen)
        together = bench.certify_together(chosen, decodes) if num_together else None
    phases = [phase for result in results for phase in result.phases] + list(together or ())
    return EquivalenceReport(
        model=model.name,
        architecture=source.header.architecture,
        n_layers=source.n_layers,
        cuts=results,
        together=None if together is None else total(together),
        rules=tuple(rule.name for rule in source.rules_used),
        is_known=source.is_known,
        refused_cuts=dict(source.refused_cuts),
        with_checkpoints=total(phase for phase in phases if phase.phase in PHASES_OF_CHECKPOINTS)
        if plan.is_recurrent
        else None,
        onward=total(phase for phase in phases if phase.phase not in PHASES_OF_CHECKPOINTS),
    )


def _carried(hidden: NDArray[np.float32], wire: HiddenType) -> NDArray[np.float32]:
    """Hidden states after encoding and decoding, float32 (rows, n_embd)."""
    return hidden_codec.decode(hidden_codec.encode(hidden, wire), wire, hidden.shape[1])


def _loss(
    wire: HiddenType, decodes: Sequence[ReferenceDecode], logits: Sequence[NDArray[np.float32]]
) -> WireLoss:
    pairs = [
        (decode.logits, cut)
        for decode, cut in zip(decodes, logits, strict=True)
        if decode.phase in _LOSS_PHASES
    ]
    whole, cut = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return wire_loss(wire, whole, cut)


def certify_isolated(
    model: Path,
    cuts: Sequence[int] | None = None,
    options: CertifyOptions | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> EquivalenceReport:
    """`certify` in a process of its own, which leaves no file and no process behind.

    Args:
        model: A whole model, a GGUF file.
        cuts: See `certify`.
        options: See `certify`.
        progress: Called with the number of decodes done and of all decodes.

    Raises:
        MeshError: As `certify` does.
        UncuttableModel: If llama.cpp aborts.
    """
    wanted = (model, cuts, options or CertifyOptions())
    with tempfile.TemporaryDirectory(prefix="spanmesh-certify-") as folder:
        try:
            report: EquivalenceReport = call(_certify, *wanted, Path(folder), progress=progress)
        except ProcessEnded as end:
            raise UncuttableModel(_crash_message(model, end.exit_code, Path(folder))) from None
    return report


def _crash_message(model: Path, exit_code: int | None, folder: Path) -> str:
    with suppress(OSError):
        lines = (folder / _OUTPUT).read_text(errors="replace").split("\n")
        said = [line.strip() for line in lines if "GGML_ASSERT" in line or "error" in line.lower()]
        if said:
            return f"llama.cpp aborts on {model.name}, whole or cut: {Path(said[-1]).name}"
    return f"llama.cpp aborts on {model.name}, whole or cut, with exit code {exit_code}"


def _certify(
    model: Path,
    cuts: Sequence[int] | None,
    options: CertifyOptions,
    folder: Path,
    report: Callable[[int, int], None],
) -> EquivalenceReport:
    """Work of the process."""
    output = os.open(folder / _OUTPUT, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    return certify(model, cuts, options, folder=folder, progress=report)


def require_exact_cut(model: SourceModel, layers: LayerRange) -> None:
    """Compare a model of an unknown family, cut at both ends of these layers, with the whole model.

    Raises:
        UncuttableModel: If the two differ, llama.cpp cannot run them, or layers have no outputs to tap.
    """
    cuts = cuts_of(layers, model.n_layers)
    if model.is_known or not cuts:
        return
    name, architecture = model.header.path.name, model.header.architecture
    log.info("self_check_started", model=name, architecture=architecture, cuts=cuts)
    try:
        report = certify_isolated(model.header.path, cuts, CertifyOptions(n_prompt=16, n_decode=4))
    except ModelError as error:
        raise _refusal(model, error.message) from error
    for result in report.cuts:
        if not result.difference.is_bit_equal:
            worst = result.difference.max_logit_diff
            raise _refusal(
                model, f"cut at {result.cut} its logits differ by up to {worst:.3g} from the whole model's"
            )
    if not report.is_exact:
        raise _refusal(
            model, f"cut at {' and '.join(map(str, cuts))} its logits differ from the whole model's"
        )
    log.info("self_check_passed", model=name, architecture=architecture, cuts=cuts)


def _refusal(model: SourceModel, reason: str) -> UncuttableModel:
    return UncuttableModel(
        f"{model.header.path.name} cannot be cut: there are no certified rules for "
        f"{model.header.architecture!r}, and the self-check failed: {reason}"
    )


def cut_stage(
    source: Path, layers: LayerRange, output: Path, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the stage file of some layers of a model, as a whole or not at all.

    A model of an unknown family is compared with its stages first.

    Args:
        source: The whole model, a GGUF file.
        layers: The layers.
        output: The stage file; replaced if it exists.
        progress: Called with the number of bytes done and of all bytes.

    Raises:
        InvalidModel: If the source is no GGUF, truncated, or lacks a tensor.
        UncuttableModel: If it has no such layers, or cannot be cut exactly there.
        ModelError: If the output cannot be written.
    """
    model = read_source(source)
    model.check_range(layers)
    require_exact_cut(model, layers)
    layout = with_shared_blocks(lay_out(model, layers))
    write_stage(model, layers, output, ByteCounter(stage_bytes(layout), progress).add)
