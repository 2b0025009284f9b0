"""Whether the generic rules are enough for a family that the table does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from spanmesh_proto.errors import ModelError, UncuttableModel

if TYPE_CHECKING:
    from stages.cutting.source_model import SourceModel
    from stages.layers import LayerRange

log = structlog.get_logger()


def cuts_of(layers: LayerRange, n_layers: int) -> tuple[int, ...]:
    """Where a stage's layers part from the rest; nowhere for the whole model."""
    return tuple(cut for cut in (layers.start, layers.stop) if 0 < cut < n_layers)


def require_exact_cut(model: SourceModel, layers: LayerRange) -> None:
    """Compare an unknown family's model, cut where these layers start and end, with itself whole.

    Raises:
        UncuttableModel: If the two differ, llama.cpp does not run them, or layers have no outputs to tap.
    """
    cuts = cuts_of(layers, model.n_layers)
    if model.is_known or not cuts:
        return
    # Certifying cuts, and cutting certifies: one of the two has to import late.
    from stages.certify import CertifyOptions  # noqa: PLC0415
    from stages.certify_apart import certify_apart  # noqa: PLC0415

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
