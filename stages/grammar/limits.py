"""How large a grammar may be, and how much work it may make: what keeps one request from holding up a stage.

A grammar is a program from a stranger. Sizes are checked before it runs; how much it computes cannot be known
before, so that is counted while it runs. What is legitimate stays far below all of these.
"""

from __future__ import annotations

from typing import Final

from spanmesh_proto.errors import InvalidRequest

MAX_GRAMMAR_BYTES: Final = 256 * 1024
MAX_RULES: Final = 8192
MAX_NODES: Final = 100_000
MAX_REPEATS: Final = 16_384
MAX_NESTING: Final = 64
# How many times what a grammar describes may stand within itself, as objects in objects do: see recursion.py.
MAX_RECURSION: Final = 16

# Ways in which the text so far can be read, at once.
MAX_CONFIGS: Final = 4096
# States and frames of one automaton: its memory. A new session gets a fresh one at half of them.
MAX_STATES: Final = 65_536
MAX_TABLE_CELLS: Final = 8 * 1024 * 1024
# Elementary steps (about a microsecond each): for one token, and for one answer.
MAX_DRAW_WORK: Final = 200_000
MAX_ANSWER_WORK: Final = 4_000_000


def refusal(reason: str) -> InvalidRequest:
    """What a client hears of a grammar that does not work."""
    return InvalidRequest(f"grammar: {reason}", param="grammar")
