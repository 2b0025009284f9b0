"""Report tools of all benchmarks: bounds, checks, Markdown pages, plots and JSON files."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
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
    """A line of an acceptance table: a bound, and the measured value.

    Attributes:
        title: Quantity, with its conditions.
        measured: The figure, or None if it was not measured.
        wanted: Its floor or its ceiling; None for a figure without a bound, which helps to read the others.
        is_ceiling: Whether `wanted` is a ceiling.
        note: What the figure is made of.
    """

    title: str
    measured: float | None
    wanted: float | None
    is_ceiling: bool = False
    note: str = ""

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
    """A condition that a run must meet.

    Attributes:
        name: The condition.
        holds: Whether it holds; None if the run was too short.
        detail: The figures.
    """

    name: str
    holds: bool | None
    detail: str

    @property
    def verdict(self) -> str:
        """`holds`, `FAILS` or `unknown`."""
        return {True: "holds", False: "FAILS", None: "unknown"}[self.holds]


@dataclass(frozen=True)
class PairedRatio:
    """Ratio of two systems that were measured in turn, with the bounds of its 95 % interval.

    Attributes:
        low: Lower bound; 0 for a single round.
        ratio: Geometric mean of the rounds' ratios.
        high: Upper bound; infinite for a single round.
    """

    low: float
    ratio: float
    high: float

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


def number(value: float | None) -> str:
    """With two decimals; empty for None."""
    return "" if value is None else f"{value:.2f}"


def lines_table(lines: Sequence[Line]) -> str:
    """An acceptance table in Markdown."""
    return markdown_table(
        ("measure", "wanted", "measured", "", "note"),
        ((line.title, line.bound, number(line.measured), line.verdict, line.note) for line in lines),
    )


def lines_text(lines: Sequence[Line]) -> str:
    """An acceptance table for a terminal."""
    return "\n".join(
        f"{line.verdict:>12}  {number(line.measured):>6} {line.bound:>6}  {line.title}"
        + (f"  ({line.note})" if line.note else "")
        for line in lines
    )


def checks_table(checks: Sequence[Check]) -> str:
    """Checks in Markdown."""
    return markdown_table(
        ("check", "holds", "figures"), ((check.name, check.verdict, check.detail) for check in checks)
    )


def checks_text(checks: Sequence[Check]) -> str:
    """Checks for a terminal."""
    return "\n".join(f"{check.verdict:>14}  {check.name}: {check.detail}" for check in checks)


def conditions_text(conditions: Mapping[str, Any]) -> str:
    """How a run was made, in one sentence."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in conditions.items()) + "."


def markdown_page(sections: Iterable[tuple[str, str]]) -> str:
    """A page of sections; those without a body are left out.

    Args:
        sections: Heading, perhaps empty, and body of each.
    """
    return "\n\n".join(f"{title}\n\n{body}".strip() for title, body in sections if body) + "\n"


def pictures_section(plots: Sequence[str]) -> tuple[str, str]:
    """A section of a page with the picture files of these names, which are beside it."""
    return "## Pictures", "\n\n".join(f"![{name}]({name})" for name in plots)


def text_page(parts: Iterable[str]) -> str:
    """Parts of a report for a terminal; empty ones are left out."""
    return "\n\n".join(part for part in parts if part)


def json_text(fields: Mapping[str, Any]) -> str:
    """A report for programs; infinite numbers and numeric keys, which JSON has not, as text."""
    return json.dumps(_plain(fields), indent=1, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def write_files(folder: Path, markdown: str, json_report: str) -> None:
    """Write `report.md` and `report.json` to a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(markdown, encoding="utf-8")
    (folder / "report.json").write_text(json_report + "\n", encoding="utf-8")


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; nothing at all if it has no lines. A `|` in a cell becomes a `/`."""
    body = ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
    if not body:
        return ""
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads), *body])


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
