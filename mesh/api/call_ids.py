"""Ids of calls: what a tool's result refers to."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Final

from mesh.text.message_parts import CallFormat

if TYPE_CHECKING:
    from collections.abc import Callable

_ALPHABET: Final = string.ascii_letters + string.digits
_NUM_CHARS: Final = 24
# Mistral's templates refuse ids of any other length.
_MISTRAL_CHARS: Final = 9
_BITS: Final = 160


class CallIds:
    """Makes one at each call.

    Args:
        random_bits: Random numbers of so many bits.
        call_format: What the model's template wants.
    """

    def __init__(self, random_bits: Callable[[int], int], call_format: CallFormat) -> None:
        self._random_bits = random_bits
        self._is_mistral = call_format is CallFormat.MISTRAL

    def __call__(self) -> str:
        """A new one, such as `call_…`."""
        rest = self._random_bits(_BITS)
        chars = []
        for _ in range(_MISTRAL_CHARS if self._is_mistral else _NUM_CHARS):
            rest, place = divmod(rest, len(_ALPHABET))
            chars.append(_ALPHABET[place])
        text = "".join(chars)
        return text if self._is_mistral else f"call_{text}"
