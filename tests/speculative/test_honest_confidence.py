"""What the n-gram proposer says of itself, against what happens: on text that it has not seen before."""

import argparse
import inspect
import re
import tarfile
import textwrap
import typing
from collections.abc import Iterator
from types import ModuleType

import pytest

from speculative.lookup_proposers import NgramProposer

WORD = re.compile(r"\w+|\s+|[^\w\s]")


def words_of(module: ModuleType) -> list[int]:
    """The source, word for word, as token ids."""
    ids: dict[str, int] = {}
    return [ids.setdefault(word, len(ids)) for word in WORD.findall(inspect.getsource(module))]


def judged(module: ModuleType) -> Iterator[tuple[float, bool]]:
    """For each proposed token up to the first wrong one: how sure the proposer was, whether it was right.

    The first half of the source is the prompt, the second half the answer.
    """
    words = words_of(module)
    place = len(words) // 2
    proposer = NgramProposer()
    proposer.extend(words[:place])
    while place < len(words):
        proposal = proposer.propose(16)
        num_right = 0
        for token, confidence in zip(proposal.tokens, proposal.confidences, strict=True):
            is_right = words[place + num_right : place + num_right + 1] == [token]
            yield confidence, is_right
            if not is_right:
                break
            num_right += 1
        proposer.extend(words[place : place + num_right + 1])
        place += num_right + 1


@pytest.mark.parametrize("module", [argparse, tarfile, textwrap, typing], ids=lambda module: module.__name__)
def test_confidence_is_what_is_accepted(module: ModuleType) -> None:
    for low, high in ((0.0, 0.4), (0.4, 0.7), (0.7, 1.01)):
        found = [(said, is_right) for said, is_right in judged(module) if low <= said < high]
        said = sum(said for said, _ in found) / len(found)
        share = sum(is_right for _, is_right in found) / len(found)
        # A share of n trials is off by less than 4 standard deviations, and some slack for what is learned.
        assert share == pytest.approx(said, abs=0.08 + 2.0 / len(found) ** 0.5), (low, high, len(found))
