"""Fuzzing with damaged join tokens."""

from __future__ import annotations

import base64
import itertools
import time
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgpack
import psutil

from mesh.cluster.admission import check_secret
from mesh.cluster.join_token import TOKEN_VERSION, JoinToken, decode, encode
from spanmesh_proto.errors import MeshError
from tests.qualification.fuzz.mutations import damaged
from tests.qualification.fuzz.report import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

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
_GOOD: Final = JoinToken(("192.0.2.7:4100", "[2001:db8::7]:4100"), "s" * 43, bytes(range(32)), 2**39)
_SLOW_S: Final = 1.0
_NUM_SAMPLES: Final = 50


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


def fuzz_tokens(options: FuzzOptions) -> FuzzReport:
    """Whatever a token contains, it is admitted or refused with one of our errors, at once.

    Args:
        options: Options of the run; the model does not matter.
    """
    tally = Tally("tokens", options, time.monotonic)
    # Not for secrets: the same seed must make the same tokens.
    random = Random(options.seed)
    process = psutil.Process()
    for number, word in enumerate(itertools.islice(hostile_tokens(_GOOD, random), options.num_cases)):
        # Decoding waits for nothing, so what it takes is processor time: a host that stops for a second is no
        # hang of ours.
        start_s = time.thread_time()
        try:
            outcome = _outcome(word)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
            tally.count("crash")
            tally.fail("crash", word.encode(errors="surrogatepass"), repr(error))
        else:
            tally.count(outcome)
            if time.thread_time() - start_s > _SLOW_S:
                tally.fail("hang", word.encode(), f"took more than {_SLOW_S:g} s of a processor")
        if number % max(options.num_cases // _NUM_SAMPLES, 1) == 0:
            tally.sample_memory(process.memory_info().rss)
    return tally.report()


def _outcome(word: str) -> str:
    try:
        token = decode(word)
        token.check_expiry(time.time())
        check_secret(token.secret, _GOOD)
    except MeshError as error:
        return type(error).__name__
    return "admitted"
