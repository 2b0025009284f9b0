"""Whether speculation is possible with a model at all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from mesh.serve.options import ServeOptions
    from stages.slicing.model_facts import ModelFacts

log = structlog.get_logger()


def speculation_refusal(model: ModelFacts) -> str | None:
    """Why nothing is proposed for a model, whatever the user wants; None if it may be."""
    if model.can_trim:
        return None
    return (
        f"{model.architecture} keeps a recurrent state, which cannot go back to before a token that was "
        "proposed and rejected"
    )


def fitted_to(options: ServeOptions, model: ModelFacts) -> ServeOptions:
    """The options as the model lets them be.

    Raises:
        ClusterError: If the user insists on a proposer, and none is possible.
    """
    reason, mode = speculation_refusal(model), options.speculation.mode
    if reason is None or mode == "off":
        return options
    if mode != "auto":
        raise ClusterError(f"--speculate {mode}: {reason}; leave it out", param="--speculate")
    log.info("speculation_off", model=model.name, reason=reason)
    return replace(options, speculation=replace(options.speculation, mode="off"))
