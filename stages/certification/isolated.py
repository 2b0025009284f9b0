"""Certification in a child process, and the self-check of unknown architectures before a cut.

The output of the process goes to a file, whose last line gives the reason if llama.cpp aborted.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto.errors import ModelError, UncuttableModel
from stages.certification.certify import CertifyOptions, certify
from stages.isolated import ProcessEnded, call
from stages.layers import cuts_of
from stages.slicing.layout import lay_out
from stages.slicing.source_model import read_source
from stages.slicing.stage_writer import ByteCounter, stage_bytes, with_shared_blocks, write_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stages.certification.comparison import EquivalenceReport
    from stages.layers import LayerRange
    from stages.slicing.source_model import SourceModel

_OUTPUT: Final = "output.txt"

log = structlog.get_logger()


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
