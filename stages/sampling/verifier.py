"""Window verifier of the tail: samples each row and compares it with the proposal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidWindow
from stages.grammar.session_grammar import GrammarRecord
from stages.sampling.logprobs import TokenLogprobs, token_logprobs
from stages.sampling.sampler import Sampler, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from stages.grammar.session_grammar import Grammars
    from stages.grammar.token_masks import TokenMasks
    from stages.sampling.session_spec import SessionSpec


def verify(
    rows_logits: Sequence[NDArray[np.float32]] | NDArray[np.float32],
    tokens: Sequence[int],
    start: int,
    choose: Callable[[NDArray[np.float32], int], int],
) -> list[int]:
    """Draw the target's own token after each verified row, for as long as it is the one that was proposed.

    Row `i` of a window tells what follows `tokens[i]`, so its draw has absolute position `start + i + 1` and
    is compared with `tokens[i + 1]`. The first difference voids the rows after it: they were computed on a
    history that was not taken. The last row has nothing to be compared with and is a free prediction.

    With tokens 5 6 7 8 at 40 and all four rows verified, draws 6 7 9 answer `[6, 7, 9]`: two accepted, and 9
    in the place of 8, at position 43.

    Args:
        rows_logits: float32, shape (verify_rows, n_vocab): logits of the window's last rows.
        tokens: All tokens of the window.
        start: Absolute position of its first row.
        choose: The session's own draw: the token for an absolute position, given the row before it.

    Returns:
        The ids drawn, up to and including the first that differs from the proposed token; empty if no row is
        to be verified.

    Raises:
        InvalidWindow: If there are more rows than tokens.
        StageFailed: If a row's logits are not finite.
    """
    first = len(tokens) - len(rows_logits)
    if first < 0:
        raise InvalidWindow(f"window at {start}: {len(rows_logits)} rows to verify, but {len(tokens)} tokens")
    drawn: list[int] = []
    for row, logits in enumerate(rows_logits, first):
        drawn.append(choose(logits, start + row + 1))
        if row + 1 < len(tokens) and drawn[-1] != tokens[row + 1]:
            break
    return drawn


_FIRST_CAPACITY: Final = 256


class TokenRecord:
    """Token ids by absolute position. Like the cache it is cut where a window starts, and goes on with it.

    So there is nothing to take back after a rejection: the next window overwrites what was rejected.
    """

    def __init__(self) -> None:
        self._ids = np.empty(_FIRST_CAPACITY, np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Forget everything from `start` on and put `tokens` there.

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
    """What the rows of a window gave.

    Attributes:
        tokens: Ids up to and including the first that differs from the proposed one.
        logprobs: One entry for each of them if the session asked for that, else none.
    """

    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...] = ()


class WindowVerifier:
    """Draws and compares for one session.

    Row `i` of a window is drawn with exactly the tokens before it in mind: those that the window itself
    proposed are among them, as the row counts only if they were accepted. For the thread that computes the
    windows, in the order in which they are computed.

    Args:
        sampling: The session's settings.
        num_prompt: How many of its first tokens are the prompt.
        num_top_logprobs: How many likeliest tokens to report beside the logprob of each that was drawn; None
            reports nothing.
        cached: The session's first tokens, of which no window will come.
        open_masks: Gives what the answer must keep to, when it is first needed; None if it is free.
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
        self._num_top_logprobs = num_top_logprobs
        self._record = TokenRecord() if self._sampler.needs_history else None
        self._grammar = None if open_masks is None else GrammarRecord(open_masks, num_prompt)
        self._write(0, cached)

    @classmethod
    def of(cls, spec: SessionSpec, grammars: Grammars) -> WindowVerifier:
        """The judge of a session that begins.

        Args:
            spec: Its terms.
            grammars: Makes its grammar ready, when that is first needed.
        """
        return cls(
            spec.sampling,
            num_prompt=spec.num_prompt,
            num_top_logprobs=spec.num_top_logprobs,
            cached=spec.cached,
            open_masks=partial(grammars.masks, spec.grammar) if spec.grammar else None,
        )

    def verify(
        self,
        rows_logits: Sequence[NDArray[np.float32]] | NDArray[np.float32],
        tokens: Sequence[int],
        start: int,
    ) -> SampledTokens:
        """Take a window that was just computed; every one, those without rows to verify too.

        Args:
            rows_logits: float32, shape (verify_rows, n_vocab): logits of the window's last rows.
            tokens: All tokens of the window.
            start: Absolute position of its first row.

        Raises:
            InvalidWindow: If there are more rows than tokens, or it leaves a gap before its start.
            StageFailed: If a row's logits are not finite.
            InvalidRequest: If the session's grammar does not work, or leaves nothing to draw.
        """
        self._write(start, tokens)
        drawn = verify(rows_logits, tokens, start, self._sample)
        if self._num_top_logprobs is None:
            return SampledTokens(drawn)
        num_top = self._num_top_logprobs
        # Rows behind the last that was drawn say nothing: strict would ask for them.
        pairs = zip(rows_logits, drawn, strict=False)
        return SampledTokens(drawn, tuple(token_logprobs(logits, token, num_top) for logits, token in pairs))

    def _write(self, start: int, tokens: Sequence[int]) -> None:
        if self._record is not None:
            self._record.write(start, tokens)
        if self._grammar is not None:
            self._grammar.write(start, tokens)

    def _sample(self, logits: NDArray[np.float32], position: int) -> int:
        before = () if self._record is None else self._record.before(position)
        if self._grammar is None:
            return self._sampler.sample(logits, position, before)
        token = self._sampler.sample(logits, position, before, self._grammar.constraint(position))
        self._grammar.note_drawn(position, token)
        return token
