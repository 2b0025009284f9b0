"""What each token of a vocabulary adds to a text, as a tail needs it to follow a grammar, and how it travels.

Stage files carry no vocabulary. So the coordinator tells it once in a ring, before the first session that has
a grammar.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import ProtocolError

_MAX_TEXT_BYTES: Final = 64 * 1024 * 1024
_QUICKEST: Final = 1


@dataclass(frozen=True)
class TokenTexts:
    """A vocabulary as bytes.

    Attributes:
        pieces: What each token id adds to the text; nothing for control tokens.
        end_tokens: The ids that end an answer.
    """

    pieces: tuple[bytes, ...]
    end_tokens: frozenset[int]

    @cached_property
    def message(self) -> wire.Vocabulary:
        """How it travels. SmolLM2's takes 20 ms to make, the first time."""
        return wire.Vocabulary(
            texts=zlib.compress(b"".join(self.pieces), _QUICKEST),
            lengths=[len(piece) for piece in self.pieces],
            end_tokens=sorted(self.end_tokens),
        )

    @classmethod
    def from_wire(cls, message: wire.Vocabulary, n_vocab: int) -> TokenTexts:
        """What the message says.

        Args:
            message: From the coordinator.
            n_vocab: Token ids are below this.

        Raises:
            ProtocolError: If it is another vocabulary's, or does not fit together.
        """
        if len(message.lengths) != n_vocab:
            raise ProtocolError(
                f"a vocabulary of {len(message.lengths)} tokens, where the model has {n_vocab}"
            )
        num_bytes = sum(message.lengths)
        if num_bytes > _MAX_TEXT_BYTES:
            raise ProtocolError(f"a vocabulary of {num_bytes} bytes: at most {_MAX_TEXT_BYTES} are read")
        unpacker = zlib.decompressobj()
        try:
            texts = unpacker.decompress(message.texts, num_bytes + 1)
        except zlib.error as error:
            raise ProtocolError(f"a vocabulary that cannot be unpacked: {error}") from None
        if len(texts) != num_bytes:
            raise ProtocolError(f"a vocabulary of other than the {num_bytes} bytes that it names")
        if any(token >= n_vocab for token in message.end_tokens):
            raise ProtocolError(f"a vocabulary that ends with a token beyond its {n_vocab}")
        bounds = pairwise(accumulate(message.lengths, initial=0))
        return cls(tuple(texts[start:stop] for start, stop in bounds), frozenset(message.end_tokens))
