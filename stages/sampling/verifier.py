"""Window verifier of the tail: samples each row and compares it with the proposal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidWindow, StageFailed
from spanmesh_proto.row_ids import has_rows
from stages.grammar.session_grammar import GrammarRecord
from stages.sampling.sampler import Sampler, SamplingParams, TokenLogprobs, token_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from stages.grammar.automaton import TokenMasks
    from stages.grammar.session_grammar import Grammars
    from stages.sampling.session_spec import SessionSpec

_FIRST_CAPACITY: Final = 256


class TokenRecord:
    """Token ids by absolute position. Truncated at the start of each window, like the KV cache.

    So nothing has to be rolled back after a rejection: the next window overwrites it.
    """

    def __init__(self) -> None:
        self._ids = np.empty(_FIRST_CAPACITY, np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Replace all tokens from `start` on.

        Raises:
            InvalidWindow: If that would leave a gap.
        """
        if start > self._size:
            raise InvalidWindow(
                f"a window starts at position {start}, but only {self._size} tokens are known"
            )
        stop = start + len(tokens)
        if stop > self._ids.size:
            grown = np.empty(max(stop, 2 * self._ids.size), np.int64)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:stop] = tokens
        self._size = stop

    def before(self, position: int) -> NDArray[np.int64]:
        """The tokens at positions below `position`: int64, a view that the next `write` may change."""
        return self._ids[: min(position, self._size)]


@dataclass(frozen=True)
class SampledTokens:
    """Samples of a window."""

    tokens: list[int]
    """Ids up to and including the first that differs from the proposed one."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each of them if requested, else empty."""


class WindowVerifier:
    """Sampler and comparison of one session.

    Row `i` of a window is sampled with exactly the tokens before it, proposed ones of the window included, as
    the row counts only if they are accepted. For the computing thread, with windows in the order in which
    they are computed.

    Args:
        sampling: Sampling parameters of the session.
        num_prompt: Number of the session's first tokens that are the prompt.
        num_top_logprobs: Number of likeliest tokens to report with each sampled one; None for no log
            probabilities.
        cached: Token ids of the cached prefix, which no window brings.
        open_masks: Returns the grammar's masks, when first needed; None without a grammar.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        num_prompt: int = 0,
        num_top_logprobs: int | None = None,
        cached: Sequence[int] = (),
        open_masks: Callable[[], TokenMasks] | None = None,
    ) -> None:
        self._sampler = Sampler(sampling, num_prompt)
        self._num_prompt = num_prompt
        self._num_top_logprobs = num_top_logprobs
        self._record = TokenRecord() if self._sampler.needs_history else None
        self._grammar = None if open_masks is None else GrammarRecord(open_masks, num_prompt)
        self._write(0, cached)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar constrains what is sampled."""
        return self._grammar is not None

    @classmethod
    def of(cls, spec: SessionSpec, grammars: Grammars) -> WindowVerifier:
        """The verifier of a new session.

        Args:
            spec: Settings of the session.
            grammars: Compiles its grammar, when first needed.
        """
        return cls(
            spec.sampling,
            num_prompt=spec.num_prompt,
            num_top_logprobs=spec.num_top_logprobs,
            cached=spec.cached,
            open_masks=partial(grammars.masks, spec.grammar, spec.client) if spec.grammar else None,
        )

    def verify(
        self,
        rows_logits: Sequence[NDArray[np.float32]] | NDArray[np.float32],
        tokens: Sequence[int],
        start: int,
        *,
        scored_next: int | None = None,
    ) -> SampledTokens:
        """Verify a computed window. To be called for every window, also for those without verified rows.

        Args:
            rows_logits: float32, shape (verify_rows, n_vocab): logits of the window's last rows.
            tokens: All tokens of the window.
            start: Absolute position of its first row.
            scored_next: Token after the last row of a part of the prompt whose tokens are scored; None to
                sample.

        Returns:
            The samples; or the tokens after the rows as they were given, if they are scored.

        Raises:
            InvalidWindow: If there are more rows than tokens, or it leaves a gap before its start, or what is
                no token follows the prompt.
            StageFailed: If a row's logits are not finite.
            InvalidRequest: If the session's grammar is invalid, or allows no token.
        """
        if has_rows(answer := tokens[max(0, self._num_prompt - start) :]):
            raise InvalidWindow(f"an answer has tokens only, and {max(answer)} is none")
        self._write(start, tokens)
        if scored_next is None:
            drawn = verify(rows_logits, tokens, start, self._sample)
        else:
            drawn = following(rows_logits, tokens, start, scored_next)
        if self._num_top_logprobs is None:
            return SampledTokens(drawn)
        num_top = self._num_top_logprobs
        # Rows after the last sampled one are not used: strict would require them.
        pairs = zip(rows_logits, drawn, strict=False)
        return SampledTokens(drawn, tuple(token_logprobs(logits, token, num_top) for logits, token in pairs))

    def foretell(self, logits: NDArray[np.float32], tokens: Sequence[int], start: int) -> int:
        """Draw what a drafter foretells behind tokens, as the model's own token there will be drawn.

        Nothing of it counts: the next window is verified as without it.

        Args:
            logits: float32, shape (n_vocab,): the drafter's.
            tokens: The newest token and the drafted ones behind it.
            start: Absolute position of the newest token.

        Raises:
            StageFailed: If the largest logit is not finite.
            InvalidRequest: If the session's grammar allows no token.
        """
        self._write(start, tokens)
        try:
            return self._drawn(logits, start + len(tokens), is_foretold=True)
        finally:
            if self._grammar is not None:
                self._grammar.note_foretold()

    def _write(self, start: int, tokens: Sequence[int]) -> None:
        if self._record is not None:
            self._record.write(start, tokens)
        if self._grammar is not None:
            self._grammar.write(start, tokens)

    def _sample(self, logits: NDArray[np.float32], position: int) -> int:
        token = self._drawn(logits, position)
        if self._grammar is not None:
            self._grammar.note_drawn(position, token)
        return token

    def _drawn(self, logits: NDArray[np.float32], position: int, *, is_foretold: bool = False) -> int:
        before = () if self._record is None else self._record.before(position)
        constraint = None
        if self._grammar is not None:
            constraint = self._grammar.constraint(position, is_foretold=is_foretold)
        return self._sampler.sample(logits, position, before, constraint)


def verify(
    rows_logits: Sequence[NDArray[np.float32]] | NDArray[np.float32],
    tokens: Sequence[int],
    start: int,
    choose: Callable[[NDArray[np.float32], int], int],
) -> list[int]:
    """Sample the target's own token after each verified row, until one differs from the proposal.

    Row `i` of a window predicts the token after `tokens[i]`, so its sample has absolute position `start + i +
    1` and is compared with `tokens[i + 1]`. The first difference voids the rows after it, which were computed
    on rejected tokens. The last row has nothing to be compared with and is a free prediction.

    With tokens 5 6 7 8 at 40 and all four rows verified, samples 6 7 9 give `[6, 7, 9]`: two accepted, and 9
    in place of 8, at position 43.

    Args:
        rows_logits: float32, shape (verify_rows, n_vocab): logits of the window's last rows.
        tokens: All tokens of the window.
        start: Absolute position of its first row.
        choose: Returns the session's sample for an absolute position, given the row before it.

    Returns:
        The sampled ids, up to and including the first that differs from the proposed token; empty if no row
        is verified.

    Raises:
        InvalidWindow: If there are more rows than tokens.
        StageFailed: If a row's logits are not finite.
    """
    first = _first_verified(rows_logits, tokens, start)
    drawn: list[int] = []
    for row, logits in enumerate(rows_logits, first):
        drawn.append(choose(logits, start + row + 1))
        if row + 1 < len(tokens) and drawn[-1] != tokens[row + 1]:
            break
    return drawn


def following(
    rows_logits: Sequence[NDArray[np.float32]] | NDArray[np.float32],
    tokens: Sequence[int],
    start: int,
    scored_next: int,
) -> list[int]:
    """The given tokens after each verified row, to be scored.

    Args:
        rows_logits: As for `verify`.
        tokens: All tokens of the window.
        start: Absolute position of its first row.
        scored_next: The token after the last.

    Raises:
        InvalidWindow: If there are no rows, or more than tokens, or a token is outside the vocabulary.
        StageFailed: If a row's logits are not finite.
    """
    first = _first_verified(rows_logits, tokens, start)
    if first == len(tokens):
        raise InvalidWindow(f"window at {start}: its tokens are to be scored, but no row is to be verified")
    found = [*tokens[first + 1 :], scored_next]
    for logits, token in zip(rows_logits, found, strict=True):
        if token >= logits.size:
            raise InvalidWindow(f"token {token} is outside the vocabulary of {logits.size}")
        if not np.isfinite(logits.max()):
            raise StageFailed(
                f"the logits before token {token} are not finite: the model file or its arithmetic on this"
                " backend is broken; run `mesh certify` on the model"
            )
    return found


def _first_verified(
    rows_logits: Sequence[NDArray[np.float32]] | NDArray[np.float32], tokens: Sequence[int], start: int
) -> int:
    first = len(tokens) - len(rows_logits)
    if first < 0:
        raise InvalidWindow(f"window at {start}: {len(rows_logits)} rows to verify, but {len(tokens)} tokens")
    return first
