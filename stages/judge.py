"""One session at the tail: what was said so far, and the judging of its windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from stages.grammar.session_grammar import GrammarRecord
from stages.logprobs import TokenLogprobs, token_logprobs
from stages.sampling import Sampler, Sampling
from stages.token_record import TokenRecord
from stages.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from stages.grammar.session_grammar import Grammars
    from stages.grammar.token_masks import TokenMasks
    from stages.opening import Opening


@dataclass(frozen=True)
class Draws:
    """What the rows of a window gave.

    Attributes:
        tokens: Ids up to and including the first that differs from the proposed one.
        logprobs: One entry for each of them if the session asked for that, else none.
    """

    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...] = ()


class Judge:
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
        sampling: Sampling,
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
    def of(cls, opening: Opening, grammars: Grammars) -> Judge:
        """The judge of a session that begins.

        Args:
            opening: Its terms.
            grammars: Makes its grammar ready, when that is first needed.
        """
        return cls(
            opening.sampling,
            num_prompt=opening.num_prompt,
            num_top_logprobs=opening.num_top_logprobs,
            cached=opening.cached,
            open_masks=partial(grammars.masks, opening.grammar) if opening.grammar else None,
        )

    def judge(
        self,
        rows_logits: Sequence[NDArray[np.float32]] | NDArray[np.float32],
        tokens: Sequence[int],
        start: int,
    ) -> Draws:
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
        drawn = verify(rows_logits, tokens, start, self._draw)
        if self._num_top_logprobs is None:
            return Draws(drawn)
        num_top = self._num_top_logprobs
        # Rows behind the last that was drawn say nothing: strict would ask for them.
        pairs = zip(rows_logits, drawn, strict=False)
        return Draws(drawn, tuple(token_logprobs(logits, token, num_top) for logits, token in pairs))

    def _write(self, start: int, tokens: Sequence[int]) -> None:
        if self._record is not None:
            self._record.write(start, tokens)
        if self._grammar is not None:
            self._grammar.write(start, tokens)

    def _draw(self, logits: NDArray[np.float32], position: int) -> int:
        before = () if self._record is None else self._record.before(position)
        if self._grammar is None:
            return self._sampler.sample(logits, position, before)
        token = self._sampler.sample(logits, position, before, self._grammar.constraint(position))
        self._grammar.note_drawn(position, token)
        return token
