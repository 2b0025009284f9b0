"""Report of figures that are held against bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshbench.report_tools import Report, Section, lines_section

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshbench.report_tools import Line


def bounded_report(
    title: str, conditions: Mapping[str, Any], lines: Sequence[Line], *tables: Section, **fields: Any
) -> Report:
    """Report that is good if every figure was measured and no bound is missed.

    Args:
        title: Title of the page.
        conditions: How the run was made, by name.
        lines: The figures.
        tables: What they are made of; before them.
        fields: For programs, besides conditions and lines.
    """
    return Report(
        title=title,
        conditions=conditions,
        sections=[*tables, lines_section("## Figures", lines)],
        fields={"conditions": conditions, "lines": lines, **fields},
        is_good=all(line.verdict not in {"missed", "not measured"} for line in lines),
    )
