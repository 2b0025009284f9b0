"""Writer of FAMILIES.md.

python -m tests.qualification.families_table record.json > FAMILIES.md
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_HEAD: Final = """\
# Families

Which families of models can be cut, found out by cutting a tiny random model of each architecture at every
place that the rules allow, alone and all at once, and comparing bits with the model whole: prefill, decode,
long prompts in chunks, spans after going back, and, with recurrent layers, up to 63 rows at once with the
same rows one by one. The models are llama.cpp's own, and this project's where its program makes none. Written
by

```sh
python -m tests.qualification.tiny_models models/d1
python -m tests.qualification.tiny_models models/d2 --depth 2
python -m tests.qualification.tiny_models models/d2-mtp --depth 2 --prediction-layers 1
python -m tests.qualification.families models/d1 models/d2 models/d2-mtp \\
  --output tests/qualification/families_record.json
python -m tests.qualification.families_table tests/qualification/families_record.json > FAMILIES.md
```

"""
_TAIL: Final = """
**d2-mtp**: the same models with a layer for multi-token prediction behind their own, which no stage holds;
those that can be written with one.

**no model**: llama.cpp's list has the architecture, and there is no tiny model of it, for the reason given.

**goes back**: how a session returns to before a rejected token. *position*: its rows are dropped.
*checkpoints*: a recurrent state has no rows, so stages copy it now and then, and go on from a copy. *no*:
not in exact mode, where nothing is proposed then.{refusals}

**pictures**: families of this architecture that read them, see below.
{wrong}
Rules are in [stages/slicing/architectures/cutting_rules.py](stages/slicing/architectures/cutting_rules.py),
each with its reason. A family that is not in the table of rules is cut by the generic ones, and only after a
self-check at the very cut.
"""
_PICTURES: Final = """
## Pictures

A tiny random model and a tiny random projector of each family, with a prompt of two pictures and six tokens
behind it: logits of libmtmd's own evaluation of the whole model against those of stages, cut at every place
that the rules allow, alone and at both outermost ones together, in exact and in fast mode, bit for bit.
**rows**: those of the chunks of both pictures. What is refused is refused by the header of the projector, or
by the rules of cuts. Written by

```sh
python -m tests.qualification.families --images --output tests/qualification/families_record.json
```

| family | architecture | projector | rows | stages | why not |
|---|---|---|---|---|---|"""
_WRONG: Final = """
**wrong**: found not to be exact, or to abort, by the rules of that run. Such families have no rules any more.
"""


class Outcome(StrEnum):
    """What became of one model."""

    BIT_EQUAL = "bit-equal"
    """At every cut that is allowed, and there is at least one."""
    REFUSED = "refused"
    """It is not cut at all, and the reason is known: by its rules, or by the self-check that a family without
    rules must pass."""
    WRONG = "wrong"
    """Its rules allow a cut that is not bit-equal."""


class GoesBack(StrEnum):
    """How sessions go back to before a rejected token, without which nothing is proposed."""

    POSITION = "position"
    """To any position: their rows are dropped."""
    CHECKPOINTS = "checkpoints"
    """To copies of the recurrent state, certified."""
    NO = "no"
    """Not at all in exact mode."""


@dataclass(frozen=True)
class FamilyRecord:
    """One model."""

    model: str
    """The file's name."""
    outcome: Outcome
    """What became of it."""
    reason: str = ""
    """Why, unless it is bit-equal."""
    architecture: str = ""
    """`general.architecture`; empty if its header cannot be read."""
    n_layers: int = 0
    """Layers."""
    rules: tuple[str, ...] = ()
    """Names of the rules that it needed beyond the generic ones."""
    is_known: bool = True
    """Whether its family is in the table."""
    goes_back: GoesBack | None = None
    """How its sessions go back; None if its header was refused."""
    why_no_checkpoints: str = ""
    """Why they do not go back to checkpoints of a recurrent state, if it was tried."""
    allowed_cuts: tuple[int, ...] = ()
    """Where it may be cut."""
    refused_cuts: Mapping[str, str] = field(default_factory=dict)
    """Where not, and why."""

    def bit_equal(self) -> FamilyRecord:
        """The same, certified."""
        return dataclasses.replace(self, outcome=Outcome.BIT_EQUAL, reason="")

    def refused(self, reason: str) -> FamilyRecord:
        """The same, not to be cut."""
        return dataclasses.replace(self, outcome=Outcome.REFUSED, reason=reason, allowed_cuts=())

    def failed(self, reason: str, *, is_known: bool) -> FamilyRecord:
        """The same, found to differ: a family without rules is refused by its self-check then."""
        if not is_known:
            return self.refused(f"the generic rules are not enough: {reason}")
        return dataclasses.replace(self, outcome=Outcome.WRONG, reason=reason)


@dataclass(frozen=True)
class PictureRecord:
    """One family that reads pictures, in both numeric modes."""

    family: str
    """Its name."""
    outcome: Outcome
    """As of a model without pictures."""
    reason: str = ""
    """Why, unless it is bit-equal."""
    architecture: str = ""
    """Of its text model."""
    projector: str = ""
    """llama.cpp's name of its projector."""
    n_layers: int = 0
    """Layers of the text model."""
    allowed_cuts: tuple[int, ...] = ()
    """Where it may be cut."""
    num_rows: tuple[int, ...] = ()
    """Rows of the chunks of the two pictures, in order."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> PictureRecord:
        """From a file."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
        }
        return cls(**values | {"outcome": Outcome(saved["outcome"])})


def to_json(record: FamilyRecord | PictureRecord) -> dict[str, Any]:
    """For a file."""
    return dataclasses.asdict(record)


def from_json(saved: Mapping[str, Any]) -> FamilyRecord:
    """From a file, also one written when sessions with a recurrent state did not go back."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
    }
    values["outcome"] = Outcome(saved["outcome"])
    if "can_trim" in values:
        values["goes_back"] = GoesBack.POSITION if values.pop("can_trim") else GoesBack.NO
    elif values.get("goes_back") is not None:
        values["goes_back"] = GoesBack(values["goes_back"])
    return FamilyRecord(**values)


def counts(records: Iterable[FamilyRecord | PictureRecord]) -> str:
    """One line for a person."""
    found = Counter(record.outcome for record in records)
    return f"{found.total()} models, " + ", ".join(f"{found[outcome]} {outcome}" for outcome in Outcome)


def markdown(document: Mapping[str, Any]) -> str:
    """The table.

    Args:
        document: What `tests.qualification.families` wrote.
    """
    runs = {name: [from_json(saved) for saved in run] for name, run in document["runs"].items()}
    lines = [_HEAD + f"llama-cpp-python {document['llama_cpp_python']}.", ""]
    lines += [f"- {name}: {counts(records)}" for name, records in runs.items()]
    pictures = [PictureRecord.of(saved) for saved in document.get("pictures", ())]
    if pictures:
        lines.append(f"- pictures: {counts(pictures)}")
    names = list(runs)
    without = document["without_model"]
    lines.append(
        f"- llama.cpp's list: {len(document['architectures'])} architectures, "
        f"{len(document['architectures']) - len(without)} with a model here, {len(without)} without one"
    )
    lines += [
        "",
        f"| model | {' | '.join(names)} | rules | goes back | pictures | why not |",
        "|---" * (len(names) + 5) + "|",
    ]
    rows = {
        model: _row(model, [_find(runs[name], model) for name in names], pictures)
        for model in {record.model for records in runs.values() for record in records}
    }
    for architecture, reason in without.items():
        rows[architecture] = f"| {architecture} | {'no model | ' * len(names)} |  |  | {reason} |"
    lines += [rows[name] for name in sorted(rows)]
    is_any_wrong = any(record.outcome is Outcome.WRONG for records in runs.values() for record in records)
    tail = _TAIL.format(wrong=_WRONG if is_any_wrong else "", refusals=_refusals(runs.values()))
    return "\n".join(lines) + "\n" + tail + (_picture_table(pictures) if pictures else "")


def _picture_table(records: Sequence[PictureRecord]) -> str:
    rows = [
        f"| {record.family} | {record.architecture} | {record.projector} | {_rows_of(record)} "
        f"| {_cell(record)} | {record.reason} |"
        for record in records
    ]
    return "\n".join([_PICTURES, *rows]) + "\n"


def _rows_of(record: PictureRecord) -> str:
    """Rows of the chunks, in one word if all have as many."""
    alike, count = set(record.num_rows), len(record.num_rows)
    return f"{count} × {record.num_rows[0]}" if len(alike) == 1 else ", ".join(map(str, record.num_rows))


def _refusals(runs: Iterable[Sequence[FamilyRecord]]) -> str:
    """Why sessions of some models do not go back to checkpoints, as sentences."""
    reasons: dict[str, str] = {}
    for record in (each for records in runs for each in records if each.why_no_checkpoints):
        reasons[record.model.removesuffix(".gguf")] = record.why_no_checkpoints
    return "".join(f"\n{model}: {reason}." for model, reason in sorted(reasons.items()))


def _find(records: Sequence[FamilyRecord], model: str) -> FamilyRecord | None:
    return next((record for record in records if record.model == model), None)


def _row(model: str, found: Sequence[FamilyRecord | None], pictures: Sequence[PictureRecord]) -> str:
    present = [record for record in found if record is not None]
    cells = ["" if record is None else _cell(record) for record in found]
    rules = dict.fromkeys(rule for record in present for rule in record.rules)
    reasons = dict.fromkeys(record.reason for record in present if record.reason)
    ways = {record.goes_back for record in present}
    goes_back = next((way for way in reversed(GoesBack) if way in ways), "")
    shown = model.removesuffix(".gguf")
    architectures = {record.architecture for record in present}
    read = ", ".join(
        each.family
        for each in pictures
        if each.architecture in architectures and each.outcome is Outcome.BIT_EQUAL
    )
    return (
        f"| {shown} | {' | '.join(cells)} | {', '.join(rules)} | {goes_back} | {read} "
        f"| {'; '.join(reasons)} |"
    )


def _cell(record: FamilyRecord | PictureRecord) -> str:
    if record.outcome is not Outcome.BIT_EQUAL:
        return str(record.outcome)
    return f"{len(record.allowed_cuts)} of {record.n_layers - 1} cuts"


if __name__ == "__main__":
    sys.stdout.write(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
