"""Join tokens that a careless or hostile person might type. Pure."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

import msgpack

from mesh.bench.fuzz.damage import damaged
from mesh.cluster.join_token import TOKEN_VERSION, JoinToken, encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

_ADDRESSES: Final = (
    "",
    ":",
    "host",
    "host:",
    "host:0",
    "host:65536",
    "host:-1",
    "host:１",
    "[::1]:1",
    "[::1",
    "a" * 64 + ":1",
    "a..b:1",
    ".:1",
    "nul\0l:1",
    "stü dio:1",
    "host:" + "9" * 2000,
)
_ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=+/ \n\0é€"


def hostile_tokens(token: JoinToken, random: Random) -> Iterator[str]:
    """Without end: `token` with letters, bytes or fields changed, and things that never were a token.

    Args:
        token: A good one.
        random: Decides.
    """
    word = encode(token)
    packed = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))
    while True:
        match random.randrange(4):
            case 0:
                yield _mistyped(word, random)
            case 1:
                yield _word(damaged(packed, random))
            case 2:
                yield _word(msgpack.packb(_fields(token, random)))
            case _:
                yield random.choice((_nested, _counted, _noise))(random)


def _word(packed: bytes) -> str:
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


def _mistyped(word: str, random: Random) -> str:
    letters = list(word)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(letters))
        letters[at : at + random.randint(0, 2)] = random.choices(_ALPHABET, k=random.randint(0, 2))
    return "".join(letters)


def _fields(token: JoinToken, random: Random) -> list[Any]:
    """The five fields, one or two of them something else."""
    fields: list[Any] = [
        TOKEN_VERSION,
        list(token.addresses),
        token.secret,
        token.fingerprint,
        token.expires_at_s,
    ]
    for _ in range(random.randint(1, 2)):
        fields[random.randrange(len(fields))] = random.choice(
            (
                None,
                True,
                -1,
                0,
                1,
                2**40,
                2**63,
                0.5,
                float("nan"),
                "",
                "x" * random.randint(1, 60),
                b"",
                random.randbytes(32),
                [],
                [random.choice(_ADDRESSES)],
                random.choices(_ADDRESSES, k=3),
                {"a": 1},
            )
        )
    return fields[: random.choice((5, 5, 5, random.randrange(5)))]


def _nested(random: Random) -> str:
    """Lists in lists, deeper than any recursion goes."""
    return _word(b"\x91" * random.randint(1, 4000))


def _counted(random: Random) -> str:
    """A list, a map, a text or bytes of up to 4294967295 entries that are not there."""
    return _word(random.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6")) + random.randbytes(4))


def _noise(random: Random) -> str:
    return "".join(random.choices(_ALPHABET, k=random.randint(0, 5000)))
