"""Reasoning switches: variables of a template that set the amount of reasoning, found by rendering it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Render = Callable[[Mapping[str, Any]], str | None]

LEVELS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Amounts of reasoning, ascending."""
_NONE: Final = LEVELS[0]
_ON: Final = "high"
# Where a template prints whatever word it gets, models know these.
_USUAL_LEVELS: Final = ("low", "medium", "high")
_NO_LEVEL: Final = "unheardof"
# Variables of templates with what switches reasoning on and off.
_SWITCHES: Final[Mapping[str, tuple[Any, Any]]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning": (True, False),
    "thinking_mode": ("enabled", "disabled"),
    "thinking_option": ("on", "off"),
}
# Variables of templates that take a word.
_EFFORTS: Final = ("reasoning_effort", "thinking_effort", "reasoning_strength")
# For no reasoning, beside that of `LEVELS`.
_OTHER_NONE: Final = "no_think"
_BUDGET: Final = "thinking_budget"
_SOME_TOKENS: Final = 512


@dataclass(frozen=True)
class ReasoningWish:
    """Amount of reasoning that a request wants; None is the template's own."""

    is_on: bool | None = None
    """Whether there is any."""
    effort: str | None = None
    """One of `LEVELS`."""
    budget_tokens: int | None = None
    """Most tokens of it."""

    @property
    def wants_reasoning(self) -> bool | None:
        """Whether there is any, by all that is said."""
        if self.is_on is not None:
            return self.is_on
        if self.effort is not None:
            return self.effort != _NONE
        return None if self.budget_tokens is None else self.budget_tokens > 0


@dataclass(frozen=True)
class ReasoningSwitches:
    """Variables of a template that set the amount of reasoning."""

    switches: tuple[str, ...] = ()
    """Those that switch it on and off."""
    efforts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Those that take a word, each with the words that it knows."""
    takes_other_efforts: bool = False
    """Whether other words are taken, too, and change nothing."""
    has_budget: bool = False
    """Whether there is one that takes a number of tokens."""

    @property
    def has_any(self) -> bool:
        """Whether there is one for more and less reasoning, or none."""
        return bool(self.switches or self.efforts)

    def variables(self, wish: ReasoningWish) -> dict[str, Any]:
        """Variables for a request; those with the usual names even if the template seems not to know them."""
        is_on = wish.wants_reasoning
        found: dict[str, Any] = {}
        if wish.effort is not None:
            found["reasoning_effort"] = wish.effort
        if is_on is not None:
            names = {"enable_thinking", *self.switches}
            found |= {name: _SWITCHES[name][0 if is_on else 1] for name in sorted(names)}
        for name, words in self.efforts:
            word = self._word(wish, words)
            if word is not None:
                found[name] = word
        if self.has_budget and is_on is False and not self.switches:
            found[_BUDGET] = 0
        elif self.has_budget and wish.budget_tokens is not None:
            found[_BUDGET] = wish.budget_tokens
        return found

    def _word(self, wish: ReasoningWish, words: tuple[str, ...]) -> str | None:
        """The word for a request; None leaves the template's own."""
        nothing = next((word for word in (_NONE, _OTHER_NONE) if word in words), None)
        if wish.wants_reasoning is False and (nothing is not None or self.switches):
            return nothing
        if wish.effort is not None:
            return wish.effort if self.takes_other_efforts else _nearest(wish.effort, words)
        # Where only a word switches reasoning on.
        is_needed = wish.wants_reasoning and nothing is not None and not self.switches
        return _nearest(_ON, words) if is_needed else None


def switches_of(render: Render) -> ReasoningSwitches:
    """Switches of a template.

    Args:
        render: Returns what the template writes with further variables, or None if it refuses them.
    """
    plain = render({})
    switches = []
    for name, values in _SWITCHES.items():
        texts = [render({name: value}) for value in values]
        if None not in texts and any(text != plain for text in texts):
            switches.append(name)
    # Some templates look at the amount only where there is reasoning.
    on = {name: _SWITCHES[name][0] for name in switches}
    efforts = []
    takes_others = False
    for name in _EFFORTS:
        unheard = render({**on, name: _NO_LEVEL})
        texts_by_word = {word: render({**on, name: word}) for word in (*LEVELS, _OTHER_NONE)}
        words = tuple(word for word, text in texts_by_word.items() if text not in (None, unheard))
        if unheard is not None and _NO_LEVEL in unheard:
            words = _USUAL_LEVELS
        elif unheard is not None and words:
            takes_others = True
        elif len({texts_by_word[word] for word in words}) < 2:
            # All the same: the template does not look at it.
            words = ()
        if words:
            efforts.append((name, words))
    with_budget = render({**on, _BUDGET: _SOME_TOKENS})
    has_budget = with_budget is not None and with_budget != render(on)
    return ReasoningSwitches(tuple(switches), tuple(efforts), takes_others, has_budget)


def _nearest(level: str, words: tuple[str, ...]) -> str:
    """The known word next to an amount, of two the higher."""
    place = LEVELS.index(level)
    known = [LEVELS.index(word) for word in words if word in LEVELS]
    return LEVELS[min(known, key=lambda each: (abs(each - place), -each))] if known else words[0]
