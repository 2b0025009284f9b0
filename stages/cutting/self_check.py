"""Whether the generic rules are enough for a family that the table does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from spanmesh_proto.errors import ModelError, UncuttableModel
from stages.certify import CertifyOptions
from stages.certify_apart import certify_apart
from stages.layers import cuts_of
from stages.slicing.layout import lay_out
from stages.slicing.source_model import read_source
from stages.slicing.stage_writer import ByteCounter, stage_bytes, with_shared_blocks, write_stage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stages.layers import LayerRange
    from stages.slicing.source_model import SourceModel

log = structlog.get_logger()


def require_exact_cut(model: SourceModel, layers: LayerRange) -> None:
    """Compare an unknown family's model, cut where these layers start and end, with itself whole.

    Raises:
        UncuttableModel: If the two differ, llama.cpp does not run them, or layers have no outputs to tap.
    """
    cuts = cuts_of(layers, model.n_layers)
    if model.is_known or not cuts:
        return
    name, architecture = model.header.path.name, model.header.architecture
    log.info("self_check_started", model=name, architecture=architecture, cuts=cuts)
    try:
        certificate = certify_apart(model.header.path, cuts, CertifyOptions(n_prompt=16, n_decode=4))
    except ModelError as error:
        raise _refusal(model, error.message) from error
    for result in certificate.cuts:
        if not result.difference.is_bit_equal:
            worst = result.difference.max_logit_diff
            raise _refusal(
                model, f"cut at {result.cut} its logits differ by up to {worst:.3g} from the whole model's"
            )
    if not certificate.is_exact:
        raise _refusal(
            model, f"cut at {' and '.join(map(str, cuts))} its logits differ from the whole model's"
        )
    log.info("self_check_passed", model=name, architecture=architecture, cuts=cuts)


def _refusal(model: SourceModel, reason: str) -> UncuttableModel:
    return UncuttableModel(
        f"{model.header.path.name} cannot be cut: there are no rules for {model.header.architecture!r} that "
        f"have been certified, and with what there is: {reason}"
    )


def cut_stage(
    source: Path, layers: LayerRange, output: Path, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the stage file for some layers of a model. It appears whole or not at all.

    A family that the table does not know is compared with the whole model first.

    Args:
        source: The whole model, a GGUF file.
        layers: Which of its layers.
        output: The stage file; replaced if it exists.
        progress: Called with bytes done and bytes in all.

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
