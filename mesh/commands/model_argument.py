"""MODEL, as commands take it: a GGUF file, or a model of the hub, which is pulled first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mesh.hub import PulledModel
    from mesh.util.progress import ProgressBars


def local_model(model: Path) -> PulledModel:
    """A model on this host.

    Args:
        model: A file, the first if there are several, or `hf:org/repo:QUANT`.

    Raises:
        ModelError: If it is at the hub, and cannot be had there.
    """
    from mesh.hub import HubLibrary, PulledModel, is_reference, parse_reference  # noqa: PLC0415
    from mesh.util.progress import progress_bars  # noqa: PLC0415
    from stages.weights.store import default_root  # noqa: PLC0415

    if not is_reference(str(model)):
        return PulledModel(model, ())
    reference = parse_reference(str(model))
    with progress_bars() as bars:
        return HubLibrary(default_root()).pull(reference, _in_bytes(bars))


def _in_bytes(bars: ProgressBars) -> Callable[[str], Callable[[int, int], None]]:
    def begin(label: str) -> Callable[[int, int], None]:
        bar = bars.add(label)
        return lambda done, total: bar(done / total if total else 1.0)

    return begin
