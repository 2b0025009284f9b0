"""Numbers in a range, refused with their value and what would do."""

from __future__ import annotations

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

_SHOWN_CHARS = 32


def between(least: float, most: float, note: str = "") -> AfterValidator:
    """A validator for a field that holds a number or nothing.

    Args:
        least: Smallest value that is allowed.
        most: Largest.
        note: What else to say when refusing, such as which value switches it off.
    """

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            raise PydanticCustomError(
                "range",
                "{value} is out of range: send {least} to {most}{note}",
                {
                    "value": str(value)[:_SHOWN_CHARS],
                    "least": f"{least:g}",
                    "most": f"{most:g}",
                    "note": note,
                },
            )
        return value

    return AfterValidator(check)
