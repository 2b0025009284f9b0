"""Block drafters over cut models, and llama.cpp's own rounds of them on whole ones.

The record has the first rounds of each case, for where llama.cpp's program cannot be built. It is written by
`python -m tests.support.block_cases`.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from mesh.draft.drafter import loadable_file, read_drafter
from speculative.proposer import DrafterKind
from stages.runtime.stage_runtime import RuntimeOptions
from stages.slicing.model_facts import read_model_facts
from tests.support.block_drafters import BlockDrafter
from tests.support.draft_oracle import DraftOracle, Round, build_draft_oracle
from tests.support.predictable_models import make_terse
from tests.support.scripted_rounds import CutModel, Script, scripted_rounds
from tests.support.tiny_families import TINY_FAMILIES, WIDE_FAMILIES
from tests.support.tiny_models import N_VOCAB, TinyModel

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORD: Final = Path(__file__).parents[1] / "data" / "block_rounds.json"
RING_SLOTS: Final = 4
RING_CTX_SIZE: Final = 256
_NUM_CHECKPOINTS: Final = 6
_CTX_SIZE: Final = 512
_NUM_RECORDED: Final = 8
_FEW_TOKENS: Final = (40, 90, 140, 190)
_DRAW: Final = np.random.default_rng(1)
PROMPT: Final = tuple(range(24, 37))
TEXTS: Final = tuple(tuple(int(token) for token in _DRAW.integers(3, 300, length)) for length in (60, 17, 33))


@dataclass(frozen=True)
class BlockCase:
    """A drafter, its target, and rounds."""

    drafter: BlockDrafter = field(default_factory=BlockDrafter)
    """The drafter."""
    script: Script = field(default_factory=lambda: Script(7, 40))
    """Drafts and verdicts."""
    target: str = "qwen3"
    """A tiny model or family."""
    cuts: tuple[int, ...] = (2, 4)
    """First layers of the stages behind the first one."""
    kv_type: str = "f16"
    """Format of the KV caches, the stages' and the drafter's."""
    is_terse: bool = False
    """Whether a few tokens are all that the target says, and the drafter, which has the same head."""

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write target and drafter; returns their files."""
        # Formats of few bits pack 32 values of a head.
        head_size = 16 if self.kv_type == "f16" else 32
        families = TINY_FAMILIES if self.kv_type == "f16" else WIDE_FAMILIES
        target = folder / f"{self.target}-{head_size}{'-terse' * self.is_terse}.gguf"
        if not target.exists():
            if self.target in families:
                family = families[self.target]
                replace(family, has_head=family.has_head or self.is_terse).write(target)
            else:
                TinyModel(self.target, seed=3, head_size=head_size).write(target)
            if self.is_terse:
                make_terse(target, _FEW_TOKENS)
        drafter = replace(self.drafter, head_size=head_size)
        return target, drafter.write(target, folder / "drafter.gguf")

    def ours(self, folder: Path) -> list[list[Round]]:
        """Rounds of all texts, which draft together."""
        target, path = self.write(folder)
        drafter = read_drafter(path, read_model_facts(target))
        model = CutModel(
            target,
            self.cuts,
            folder,
            drafter.layers,
            num_slots=len(TEXTS),
            ctx_size=_CTX_SIZE,
            kv_type=self.kv_type,
        )
        try:
            return scripted_rounds(
                drafter,
                loadable_file(drafter, target, folder),
                model,
                TEXTS,
                self.script,
                n_vocab=N_VOCAB,
                ctx_size=_CTX_SIZE,
                kv_type=self.kv_type,
            )
        finally:
            model.close()

    def theirs(self, folder: Path, program: Path) -> list[list[Round]]:
        """llama.cpp's rounds of each text alone."""
        return self._rounds(folder, program, TEXTS, self.script)

    def answer(self, folder: Path, program: Path) -> list[Round]:
        """llama.cpp's rounds of the model's own answer to `PROMPT`; none drafts the answer's first token."""
        [[first, second]] = self._rounds(folder, program, [PROMPT], replace(self.script, num_rounds=2))
        token = first.drafted[0] if first.num_accepted else second.last
        [rounds] = self._rounds(folder, program, [(*PROMPT, token)], self.script)
        return rounds

    def _rounds(
        self, folder: Path, program: Path, texts: Sequence[Sequence[int]], script: Script
    ) -> list[list[Round]]:
        target, path = self.write(folder)
        kind = "dspark" if self.drafter.kind is DrafterKind.DSPARK else "dflash"
        return DraftOracle(program, target, path, kind).rounds(
            texts,
            script.num_drafted,
            script.num_rounds,
            verdicts=script.verdicts,
            p_min=script.p_min,
            kv_type=self.kv_type,
        )


@dataclass(frozen=True)
class RingTarget:
    """How a tiny model runs in three stages."""

    cuts: tuple[int, int]
    """First layers of the second and the third stage."""
    kv_types: tuple[str, ...] = ("f16",)
    """Formats of KV caches that it can have."""
    can_trim: bool = True
    """False for models with recurrent layers."""
    has_windows: bool = False
    """Whether layers attend to a sliding window only."""

    def options(self, kv_type: str = "f16") -> RuntimeOptions:
        """Options of its stages: `RING_SLOTS` sessions of `RING_CTX_SIZE` positions, in exact mode."""
        return RuntimeOptions(
            num_slots=RING_SLOTS,
            ctx_size=RING_CTX_SIZE,
            exact=True,
            kv_type=kv_type,
            num_checkpoints=0 if self.can_trim else _NUM_CHECKPOINTS,
        )


_ALL_TYPES: Final = ("f16", "q8_0", "q4_0")
RING_TARGETS: Final = {
    "qwen3": RingTarget((2, 4), _ALL_TYPES),
    "gemma4": RingTarget((2, 4), has_windows=True),
    # Experts, with windows and without.
    "gpt-oss": RingTarget((1, 3), _ALL_TYPES, has_windows=True),
    "qwen3moe": RingTarget((1, 3)),
    # Recurrent layers, and experts.
    "qwen3next": RingTarget((2, 4), _ALL_TYPES, can_trim=False),
}


def ring_case(target: str, kind: DrafterKind, kv_type: str = "f16") -> BlockCase:
    """A case over a ring, whose verdicts are the model's own, and whose drafts are right at times."""
    return BlockCase(
        BlockDrafter(kind, mixing=40.0),
        Script(7, 24, "greedy"),
        target,
        RING_TARGETS[target].cuts,
        kv_type,
        is_terse=True,
    )


_DFLASH: Final = BlockDrafter()
_DSPARK: Final = BlockDrafter(DrafterKind.DSPARK)
_DFLASH2: Final = BlockDrafter(DrafterKind.DFLASH2)
_OF_EIGHT: Final = Script(8, 40)
CASES: Final = {
    "dflash": BlockCase(),
    "dflash, four of seven": BlockCase(script=Script(4, 40)),
    "dflash, much mixed": BlockCase(replace(_DFLASH, mixing=40.0)),
    "dflash, windows": BlockCase(replace(_DFLASH, window=24, n_layers=3)),
    "dflash, causal": BlockCase(replace(_DFLASH, is_causal=True)),
    "dflash, positions in sections": BlockCase(replace(_DFLASH, has_sections=True)),
    "dflash, keys are values": BlockCase(replace(_DFLASH, shares_values=True)),
    "dflash, own vocabulary": BlockCase(replace(_DFLASH, num_own_tokens=96)),
    "dflash, head of the target": BlockCase(replace(_DFLASH, is_complete=False)),
    "dspark": BlockCase(_DSPARK, _OF_EIGHT),
    "dspark, first row foretells none": BlockCase(replace(_DSPARK, samples_anchor=False)),
    "dspark, sure tokens": BlockCase(_DSPARK, replace(_OF_EIGHT, p_min=0.2)),
    "dspark, no confidences": BlockCase(replace(_DSPARK, has_confidence=False), _OF_EIGHT),
    "dspark, own vocabulary": BlockCase(replace(_DSPARK, num_own_tokens=96), _OF_EIGHT),
    "dspark, head of the target": BlockCase(replace(_DSPARK, is_complete=False), _OF_EIGHT),
    "dflash2": BlockCase(_DFLASH2),
    "dflash2, sure tokens": BlockCase(_DFLASH2, Script(7, 40, p_min=0.3)),
    "dflash2, head of the target": BlockCase(replace(_DFLASH2, is_complete=False)),
    "dflash, KV caches q8_0": BlockCase(kv_type="q8_0"),
    "dspark, KV caches q8_0": BlockCase(_DSPARK, kv_type="q8_0"),
    "dflash2, KV caches q8_0": BlockCase(_DFLASH2, kv_type="q8_0"),
    "dflash, KV caches q4_0": BlockCase(kv_type="q4_0"),
    "dspark, KV caches q4_0": BlockCase(_DSPARK, kv_type="q4_0"),
    "dflash2, KV caches q4_0": BlockCase(_DFLASH2, kv_type="q4_0"),
} | {
    f"{name}, {drafter.kind.value}": BlockCase(drafter, Script(7, 30, verdicts), name, (2,))
    for name, verdicts in (
        ("gpt-oss", "scripted"),
        ("qwen3moe", "scripted"),
        # A model with recurrent layers would go back to checkpoints.
        ("qwen3next", "all"),
    )
    for drafter in (_DFLASH, _DSPARK, _DFLASH2)
}
# Of three kinds of models.
RING_CASES: Final = {
    f"ring, {case.target}, {case.drafter.kind.value}": case
    for case in (
        ring_case("gpt-oss", DrafterKind.DFLASH, "q8_0"),
        ring_case("qwen3next", DrafterKind.DSPARK),
        ring_case("qwen3", DrafterKind.DFLASH2, "q4_0"),
    )
}


def recorded() -> dict[str, list[list[str]]]:
    """First rounds of each text, by case."""
    found: dict[str, list[list[str]]] = json.loads(RECORD.read_text())
    return found


def first_lines(rounds: list[Round]) -> list[str]:
    """The first rounds of a text, as the record has them."""
    return lines(rounds[:_NUM_RECORDED])


def lines(rounds: Sequence[Round]) -> list[str]:
    """Rounds as the record has them."""
    return [
        f"{each.position} {each.last} | {' '.join(map(str, each.drafted))} | {each.num_accepted}"
        for each in rounds
    ]


def main() -> None:
    """Record llama.cpp's rounds."""
    os.environ["GGML_CPU_TILED_MM"] = "0"
    program = build_draft_oracle()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            found[name] = [first_lines(rounds) for rounds in case.theirs(Path(folder), program)]
        for name, case in RING_CASES.items():
            found[name] = [lines(case.answer(Path(folder), program))]
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
