"""Why a schema cannot become a grammar."""

from __future__ import annotations


class SchemaError(Exception):
    """A part of a schema that no grammar can say, or that means nothing; `where` it is, the reader adds.

    Args:
        reason: What is wrong, beginning with the keyword.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = ""
