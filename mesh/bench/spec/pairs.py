"""Speculation against none: the same question, in the same turn, on the same mesh. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.bench.spec.sample import LLAMA_RPC, MESH
from mesh.bench.spec.setting import OFF

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mesh.bench.spec.sample import Sample


@dataclass(frozen=True)
class Pair:
    """Two answers to one question.

    Attributes:
        base: What `other` is compared with.
        other: Under the setting that is looked at.
    """

    base: Sample
    other: Sample

    @property
    def speed_up(self) -> float:
        """How many times faster `other` decoded."""
        return self.other.tokens_per_s / self.base.tokens_per_s

    @property
    def is_fork(self) -> bool:
        """Whether the texts differ."""
        return self.base.text != self.other.text

    @property
    def common_share(self) -> float:
        """How much of the base's text the two have in common from its start, in [0, 1]."""
        longest = max(len(self.base.text), len(self.other.text), 1)
        same = 0
        for left, right in zip(self.base.text, self.other.text, strict=False):
            if left != right:
                return same / longest
            same += 1
        return 1.0 if not self.is_fork else same / longest


def pairs_with_off(samples: Iterable[Sample]) -> tuple[Pair, ...]:
    """Each answer of the mesh under a setting, with the answer under `off` of the same turn."""
    turns = _by_turn(samples)
    return tuple(
        Pair(off, sample)
        for turn in turns
        for off in turn
        if is_off(off)
        for sample in turn
        if sample.system == MESH and not is_off(sample)
    )


def pairs_with_rpc(samples: Iterable[Sample], setting: str) -> tuple[Pair, ...]:
    """Each answer of the mesh under a setting, with llama.cpp RPC's of the same turn."""
    return tuple(
        Pair(rpc, sample)
        for turn in _by_turn(samples)
        for rpc in turn
        if rpc.system == LLAMA_RPC
        for sample in turn
        if sample.system == MESH and sample.setting == setting
    )


def is_off(sample: Sample) -> bool:
    """Whether it is plain decoding by the mesh."""
    return sample.system == MESH and sample.setting == OFF.name


def _by_turn(samples: Iterable[Sample]) -> Sequence[list[Sample]]:
    turns: dict[int, list[Sample]] = {}
    for sample in samples:
        turns.setdefault(sample.turn, []).append(sample)
    return list(turns.values())
