"""Frames between the reader of pictures and the processes that decode them, and the bounds of both."""

from __future__ import annotations

import struct
from typing import Final

JOB: Final = struct.Struct("<I")
"""Header of a job, before a picture's bytes: the longest side that is wanted; 0 for the picture as it is."""

ANSWER: Final = struct.Struct("<II")
"""Width and height, before the pixels; both 0 before a reason."""

MOST_BYTES: Final = 20 * 2**20
"""Of a picture as it is sent."""

MOST_PIXELS: Final = 16 * 2**20
MOST_RATIO: Final = 100
"""Most times that one side may be as long as the other."""
