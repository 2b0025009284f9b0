"""Answers to be replayed: what `mesh serve --replay-file` reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.bench.stream_client import Ask
    from mesh.tokenizer import Tokenizer


class ReplayFile:
    """Collects answers.

    Args:
        path: The file, which is made anew.
        tokenizer: Of the served model.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path = path
        self._tokenizer = tokenizer
        path.write_text("", encoding="utf-8")

    def record(self, ask: Ask, text: str) -> None:
        """Note the answer to a request."""
        tokens = self._tokenizer.encode(text, add_special=False, parse_special=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"ask": ask.body, "tokens": tokens}) + "\n")
