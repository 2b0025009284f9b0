"""A command whose `--help` lists its options in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

_REST: Final = "Others"


class SectionedCommand(click.Command):
    """Like any other, but for its help.

    Args:
        sections: Flags by the title that they stand under, in order; what is in none comes last.
    """

    def __init__(self, *arguments: Any, sections: Mapping[str, tuple[str, ...]], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every option once."""
        left = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                left[max(param.opts, key=len)] = record
        for title, flags in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([left.pop(flag) for flag in flags])
        with formatter.section(_REST):
            formatter.write_dl(list(left.values()))
