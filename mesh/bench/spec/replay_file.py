"""Answers to be replayed: what `mesh serve --replay-file` reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.bench.stream_client import Answer, Ask


class ReplayFile:
    """Collects answers, as the tokens that the model said: their text may have come from others.

    Args:
        path: The file, which is made anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("", encoding="utf-8")

    def record(self, ask: Ask, answer: Answer) -> None:
        """Note the answer to a request.

        Raises:
            MeshError: If its tokens are not all there.
        """
        if len(answer.token_ids) != answer.num_tokens:
            raise MeshError(
                f"an answer of {answer.num_tokens} tokens came with {len(answer.token_ids)} token ids:"
                " ask for them with return_token_ids"
            )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"ask": ask.body, "tokens": answer.token_ids}) + "\n")
