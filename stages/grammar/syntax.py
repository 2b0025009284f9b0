"""What a GBNF text says, as a tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.grammar.utf8_ranges import CodeRange


@dataclass(frozen=True)
class Literal:
    """A text, as it stands; perhaps an empty one."""

    text: str


@dataclass(frozen=True)
class Chars:
    """One code point out of these ranges: disjoint, ascending, not none."""

    ranges: tuple[CodeRange, ...]


@dataclass(frozen=True)
class Ref:
    """What the rule of this name says."""

    name: str


@dataclass(frozen=True)
class Sequence:
    """One after the other."""

    items: tuple[Expression, ...]


@dataclass(frozen=True)
class Choice:
    """One of these."""

    options: tuple[Expression, ...]


@dataclass(frozen=True)
class Repeat:
    """An item at least so many times, and at most so many; None is no bound."""

    item: Expression
    least: int
    most: int | None


Expression = Literal | Chars | Ref | Sequence | Choice | Repeat
