"""Damaged join tokens: a host reads them, and the head judges those that can be read."""

from __future__ import annotations

import itertools
import time
from random import Random
from typing import TYPE_CHECKING, Final

import psutil

from mesh.bench.fuzz.tally import Tally
from mesh.bench.fuzz.token_words import hostile_tokens
from mesh.cluster.admission import check_secret
from mesh.cluster.join_token import JoinToken, decode
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from mesh.bench.fuzz.options import FuzzOptions
    from mesh.bench.fuzz.report import FuzzReport

_GOOD: Final = JoinToken(("192.0.2.7:4100", "[2001:db8::7]:4100"), "s" * 43, bytes(range(32)), 2**39)
_SLOW_S: Final = 1.0
_NUM_SAMPLES: Final = 50


def fuzz_tokens(options: FuzzOptions) -> FuzzReport:
    """Whatever a token says, it is admitted or refused with one of our errors, at once.

    Args:
        options: What the user says; the model does not matter.
    """
    tally = Tally("tokens", options, time.monotonic)
    # Not for secrets: the same seed must make the same tokens.
    random = Random(options.seed)  # noqa: S311
    process = psutil.Process()
    for number, word in enumerate(itertools.islice(hostile_tokens(_GOOD, random), options.num_cases)):
        start_s = time.monotonic()
        try:
            outcome = _outcome(word)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
            tally.count("crash")
            tally.fail("crash", word.encode(errors="surrogatepass"), repr(error))
        else:
            tally.count(outcome)
            if time.monotonic() - start_s > _SLOW_S:
                tally.fail("hang", word.encode(), f"took more than {_SLOW_S:g} s")
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
