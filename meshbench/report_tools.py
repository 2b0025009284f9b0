"""Reports of all measurements, and their parts: bounds, checks, tables and plots."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from itertools import zip_longest
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

# Among the failures of a run that Ctrl-C or a time limit ended.
INTERRUPTED: Final = "interrupted: the rest is missing"
# Of the rates of another checkout, by the lower bound of the interval.
NO_LESS: Final = 0.97
# Quantiles of Student's t distribution, 0.975, by degrees of freedom from 1.
_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)

log = structlog.get_logger()


@dataclass(frozen=True)
class Line:
    """A line of an acceptance table: a bound, and the measured value."""

    title: str
    """Quantity, with its conditions."""
    measured: float | None
    """The figure, or None if it was not measured."""
    wanted: float | None
    """Its floor or its ceiling; None for a figure without a bound, which helps to read the others."""
    is_ceiling: bool = False
    """Whether `wanted` is a ceiling."""
    note: str = ""
    """What the figure is made of."""

    @property
    def verdict(self) -> str:
        """`met`, `missed`, `not measured`, or nothing without a bound."""
        if self.measured is None:
            return "not measured"
        if self.wanted is None:
            return ""
        is_met = self.measured <= self.wanted if self.is_ceiling else self.measured >= self.wanted
        return "met" if is_met else "missed"

    @property
    def bound(self) -> str:
        """Such as `≥ 2.5`; empty without a bound."""
        return "" if self.wanted is None else f"{'≤' if self.is_ceiling else '≥'} {self.wanted:g}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True)
class Check:
    """A condition that a run must meet."""

    name: str
    """The condition."""
    holds: bool | None
    """Whether it holds; None if the run was too short."""
    detail: str
    """The figures."""

    @property
    def verdict(self) -> str:
        """`holds`, `FAILS` or `unknown`."""
        return {True: "holds", False: "FAILS", None: "unknown"}[self.holds]


@dataclass(frozen=True)
class PairedRatio:
    """Ratio of two systems that were measured in turn, with the bounds of its 95 % interval."""

    low: float
    """Lower bound; 0 for a single round."""
    ratio: float
    """Geometric mean of the rounds' ratios."""
    high: float
    """Upper bound; infinite for a single round."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> PairedRatio:
        """From one pair a round: logarithms of ratios, taken as normally distributed."""
        logarithms = [math.log(own / other) for own, other in pairs]
        middle = mean(logarithms)
        if len(pairs) == 1:
            return cls(0.0, math.exp(middle), math.inf)
        freedom = len(pairs) - 1
        quantile = _T_975[min(freedom, len(_T_975)) - 1]
        margin = quantile * stdev(logarithms) / math.sqrt(len(pairs))
        return cls(*(math.exp(middle + part * margin) for part in (-1, 0, 1)))

    def line(self, title: str, other: str, note: str) -> Line:
        """The ratio, with its interval."""
        between = f"{self.low:.3f} to {self.high:.3f} in {note}"
        return Line(f"{title}, over {other}", self.ratio, None, note=between)

    def lines(self, title: str, other: str, note: str) -> list[Line]:
        """The ratio of rates, and the lower end of its interval against the allowed loss."""
        return [
            self.line(title, other, note),
            Line(f"{title}, over {other}: lower bound", self.low, NO_LESS),
        ]


@dataclass(frozen=True)
class Section:
    """Part of a report."""

    heading: str
    """A line of Markdown; may be empty."""
    body: str
    """In Markdown; a section without a body is not on the page."""
    terminal: str = ""
    """What a terminal shows of it; nothing unless given."""

    @property
    def markdown(self) -> str:
        """For a page; empty without a body."""
        return f"{self.heading}\n\n{self.body}".strip() if self.body else ""


# Place of the pictures among the sections of a report.
PICTURES: Final = Section("## Pictures", "")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run found."""

    title: str
    """Title of the page."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """How the run was made, by name; empty if a section tells it."""
    sections: Sequence[Section]
    """Parts, in the order of the page and of the terminal."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """For programs; dataclasses become objects."""
    is_good: bool = True
    """Whether the command is to end with 0."""
    samples: Mapping[str, Any] = field(default_factory=dict)
    """Further fields, of `report.json` alone."""
    pictures: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    """How to draw each file that is beside the page."""

    def markdown(self, pictures: Sequence[str] = ()) -> str:
        """The page.

        Args:
            pictures: Names of the picture files beside it.
        """
        shown = replace(PICTURES, body="\n\n".join(f"![{name}]({name})" for name in pictures))
        parts = [(shown if each is PICTURES else each).markdown for each in self.sections]
        return _joined([f"# {self.title}", self._conditions_text, *parts]) + "\n"

    def text(self) -> str:
        """For a terminal."""
        return _joined([self._conditions_text, *(section.terminal for section in self.sections)])

    def json(self, *, with_samples: bool = False) -> str:
        """For programs; infinite numbers and numeric keys, which JSON has not, as text.

        Args:
            with_samples: Whether the samples are included.
        """
        fields = {**self.fields, **self.samples} if with_samples else self.fields
        return json.dumps(_plain(fields), indent=1, ensure_ascii=False, allow_nan=False)

    def write(self, folder: Path) -> None:
        """Write `report.md`, `report.json` and the pictures to a folder, which is made if it is not there.

        Without matplotlib there are no pictures, and a line in the log.
        """
        folder.mkdir(parents=True, exist_ok=True)
        drawn = self.pictures if self.pictures and can_draw() else {}
        for name, draw in drawn.items():
            draw(folder / name)
        (folder / "report.md").write_text(self.markdown(tuple(drawn)), encoding="utf-8")
        (folder / "report.json").write_text(self.json(with_samples=True) + "\n", encoding="utf-8")

    @property
    def _conditions_text(self) -> str:
        """In one sentence."""
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.conditions.items())
        return f"{told}." if told else ""


def all_hold(checks: Iterable[Check]) -> bool:
    """Whether no check fails; one of a run that was too short does not count."""
    return all(check.holds is not False for check in checks)


def number(value: float | None) -> str:
    """With two decimals; empty for None."""
    return "" if value is None else f"{value:.2f}"


def lines_section(heading: str, lines: Sequence[Line]) -> Section:
    """An acceptance table."""
    heads = ("measure", "wanted", "measured", "", "note")
    rows = ((line.title, line.bound, number(line.measured), line.verdict, line.note) for line in lines)
    terminal = "\n".join(
        f"{line.verdict:>12}  {number(line.measured):>6} {line.bound:>6}  {line.title}"
        + (f"  ({line.note})" if line.note else "")
        for line in lines
    )
    return Section(heading, markdown_table(heads, rows), terminal)


def checks_section(heading: str, checks: Sequence[Check]) -> Section:
    """A table of checks."""
    rows = ((check.name, check.verdict, check.detail) for check in checks)
    terminal = "\n".join(f"{check.verdict:>14}  {check.name}: {check.detail}" for check in checks)
    return Section(heading, markdown_table(("check", "holds", "figures"), rows), terminal)


def table_section(heading: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Section:
    """A table, on a terminal too; nothing at all if it has no rows."""
    return Section(heading, markdown_table(heads, rows), columns_text([heads, *rows]) if rows else "")


def list_section(heading: str, label: str, items: Sequence[str]) -> Section:
    """A list, whose items begin with a label on a terminal."""
    return Section(
        heading,
        "\n".join(f"- {item}" for item in items),
        "\n".join(f"{label}: {item}" for item in items),
    )


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; nothing at all if it has no lines. A `|` in a cell becomes a `/`."""
    body = ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
    if not body:
        return ""
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads), *body])


def columns_text(rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: first and last column to the left, numbers between them to the right."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in {0, len(row) - 1} else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def can_draw() -> bool:
    """Whether matplotlib is installed; if not, a log line names the extra."""
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no_pictures", remedy="pip install 'spanmesh[bench]'")
        return False
    return True


def new_figure(across: str, up: str) -> tuple[Any, Any]:
    """A figure and its axes with two titles, without pyplot, which would look for a screen."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    return figure, axes


def save_figure(figure: Any, axes: Any, path: Path) -> None:
    """Write a figure with the legend of its curves."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _plain(value: Any) -> Any:
    if isinstance(value, Line):
        value = value.as_dict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
