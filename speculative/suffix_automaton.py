"""An index of everything a sequence has said before, grown token by token.

The suffix automaton of Blumer et al. ("The smallest automaton recognizing the subwords of a text", 1985),
built online: each state stands for the substrings that end at the same set of places, a state's *link*
leads to its longest suffix that ends in more places, and appending a token is amortised constant time. At
most two states per token.
"""

from __future__ import annotations

from typing import Final, NamedTuple

ROOT: Final = 0

# How many states up the links learn of a new end. Text needs some ten; the bound is for text that loops,
# whose links are as many as its tokens. States beyond keep an earlier end, which is an occurrence too.
_MAX_ENDS_UPDATED: Final = 64


class Match(NamedTuple):
    """The longest suffix of some sequence that occurs in the index.

    Attributes:
        state: Where the automaton stands after reading the suffix.
        length: Tokens in the suffix; 0 is no match.
    """

    state: int
    length: int


NO_MATCH: Final = Match(ROOT, 0)


class SuffixAutomaton:
    """The substrings of `tokens`, and where each ended last before the end of the sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        # Index of the token after an occurrence of the state's substrings.
        self._end: list[int] = [0]
        self._last = ROOT
        # The longest suffix of `tokens` that also ended earlier.
        self.repeated = NO_MATCH

    def append(self, token: int) -> None:
        """Add one token."""
        # `repeated` must tell of earlier ends, so the end of the sequence is entered one token late.
        self._enter_end(len(self.tokens))
        self.tokens.append(token)
        state = self._add_state({}, ROOT, self._length[self._last] + 1, len(self.tokens))
        walk = self._last
        while walk >= 0 and token not in self._next[walk]:
            self._next[walk][token] = state
            walk = self._link[walk]
        if walk >= 0:
            self._link[state] = self._suffix_state(walk, token)
        self._last = state
        self.repeated = Match(self._link[state], self._length[self._link[state]])

    def advance(self, match: Match, token: int) -> Match:
        """The longest suffix that matches after reading `token` behind `match`."""
        state, length = match
        while state >= 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state] if state >= 0 else 0
        return Match(self._next[state][token], length + 1) if state >= 0 else NO_MATCH

    def end(self, match: Match) -> int:
        """Index in `tokens` of what followed the match where it occurred last.

        The end of `tokens` counts only for a match that occurred nowhere before it.
        """
        return self._end[match.state]

    def _suffix_state(self, walk: int, token: int) -> int:
        """The state for the longest substring of `walk` followed by `token`, split off if it shares one."""
        target = self._next[walk][token]
        length = self._length[walk] + 1
        if self._length[target] == length:
            return target
        clone = self._add_state(dict(self._next[target]), self._link[target], length, self._end[target])
        self._link[target] = clone
        while walk >= 0 and self._next[walk].get(token) == target:
            self._next[walk][token] = clone
            walk = self._link[walk]
        return clone

    def _enter_end(self, end: int) -> None:
        state = self._last
        for _ in range(_MAX_ENDS_UPDATED):
            if state <= ROOT:
                return
            self._end[state] = end
            state = self._link[state]

    def _add_state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1
