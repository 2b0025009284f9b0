"""Recorders of answers of SmolLM2, for tests over real stages."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.coordinator.feature_store import FeatureNeeds
from mesh.tuning.conversation_file import read_conversation
from mesh.tuning.recorder import CONTEXT, Recorder
from mesh.tuning.recording import RecordingHeader, conversation_paths, recorded_model
from mesh.tuning.recording_folder import RecordingFolder, RecordingLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mesh.tuning.conversation_file import Conversation

# Their outputs are the inputs of layers 2, 15 and 27.
LAYERS = (1, 14, 26)
NEEDS = FeatureNeeds(LAYERS, 30, 576, context=CONTEXT)


@dataclass(frozen=True)
class Recorded:
    """A recorder of a folder."""

    folder: Path
    header: RecordingHeader
    recorder: Recorder

    def conversations(self) -> list[Conversation]:
        """All that are written by now, oldest first."""
        return [read_conversation(path, self.header.shape) for path in conversation_paths(self.folder)]


@contextmanager
def recording(
    model: Path, folder: Path, agreed: Callable[[], frozenset[str] | None] = lambda: None
) -> Iterator[Recorded]:
    """A recorder, which has written everything behind the block."""
    header = RecordingHeader(recorded_model(model), tuple(layer + 1 for layer in LAYERS))
    opened = RecordingFolder(folder, header, RecordingLimits(1 << 28, 30), one_bytes=1)
    recorder = Recorder(opened, header.shape, agreed, most_bytes=1 << 28)
    try:
        yield Recorded(folder, header, recorder)
    finally:
        recorder.close()
