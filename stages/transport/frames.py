"""Frames: messages from one stage to the next, whatever link carries them."""

from __future__ import annotations

from typing import Final

from spanmesh_proto import windows_pb2 as wire

# The receiver's limit for one frame.
MOST_BUNDLED_WINDOWS: Final = 256
LinkMessage = wire.Vocabulary | wire.Open | wire.WindowBundle


def frame_of(message: LinkMessage) -> wire.Frame:
    """The frame of a message."""
    if isinstance(message, wire.Open):
        return wire.Frame(open=message)
    if isinstance(message, wire.Vocabulary):
        return wire.Frame(vocabulary=message)
    return wire.Frame(windows=message)
