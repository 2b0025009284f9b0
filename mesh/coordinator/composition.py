"""Features of a coordinator: the one place that names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.coordinator.checkpoint_plan import CheckpointPlug
from mesh.coordinator.disk_prefixes import DiskPlug
from mesh.coordinator.feature_plug import FeaturePlug
from mesh.coordinator.image_plug import ImagePlug
from mesh.coordinator.tail_draft_plug import TailDraftPlug
from mesh.coordinator.tuning_plug import TuningPlug

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.coordinator.feature_store import FeatureNeeds
    from mesh.coordinator.plugs import Plug
    from mesh.coordinator.tuning_plug import Tuning
    from mesh.options.model import ModelOptions
    from mesh.tuning.recorder import Recorder
    from stages.slicing.model_facts import ModelFacts


def plugs_of(
    options: ModelOptions,
    model: ModelFacts,
    feature_needs: FeatureNeeds | None = None,
    *,
    recorder: Recorder | None = None,
    has_assistant: bool = False,
    tuning: Tuning | None = None,
) -> Iterator[Plug]:
    """The plugs of a model's coordinator.

    Args:
        options: What the user asks for.
        model: Facts of the model.
        feature_needs: Hidden states that its drafter reads, or that are recorded; None for neither.
        recorder: Recorder of its answers; None if none are recorded.
        has_assistant: Whether an assistant drafts beside the last stage.
        tuning: What tunes its drafter in the background; None if nothing does.
    """
    yield DiskPlug(has_windows=model.has_windows)
    if options.projector_path is not None:
        yield ImagePlug(options.picture_rows_bytes)
    if options.checkpoints and not model.can_trim:
        yield CheckpointPlug(options.checkpoints)
    if feature_needs is not None:
        yield FeaturePlug(feature_needs, recorder)
    if has_assistant:
        yield TailDraftPlug()
    if tuning is not None:
        yield TuningPlug(tuning)
