"""Loaded drafter: its proposers, and the thread that drafts for them, with slots and priorities.

It knows of a kind what `Context` and `DraftSequence` say.

Speculative decoding with a separate draft model (Leviathan et al. 2023, Chen et al. 2023), run continuously
as in PipeInfer (Butler et al. 2024): while windows are in flight it drafts on from them, and after a
rejection it trims its own KV cache and continues there. It samples as the target's sampler would, with the
same noise (Daliri et al. 2024, drafter-invariant speculative decoding), so the two agree above temperature 0
as well.

Drafters that read hidden states run in the same way. Stages send features to the coordinator
(`mesh.coordinator.feature_plug`); what is late or lost costs acceptance only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from speculative.cost_model import BatchTimeModel, DraftCost, moved
from speculative.draft.context import MAX_ROWS, DraftUnusable, SlotRows, probability
from speculative.draft.kinds import KINDS
from speculative.draft.session import DraftedToken
from speculative.proposer import FeatureReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from speculative.draft.context import Context, DraftFile, DraftOptions, DraftOutput, DraftSpan
    from speculative.draft.session import DraftSequence
    from speculative.proposer import Proposal, Replace

_FEW_ROWS: Final = 4
_MAX_ROWS_BESIDE_DRAFTS: Final = 8
MAX_ROWS_UNASKED: Final = 64
"""Most rows of a batch that no answer waits for yet: it delays requests that come meanwhile."""
# Compared at once, in compiled code: the event loop may wait for the thread that compares.
_NUM_COMPARED: Final = 1024
_NEWEST_WEIGHT: Final = 0.1
# What a further token of a block takes is a mean over so many.
_NUM_COMPARED_ROWS: Final = 8
# Returns the token for an absolute position, given the logits and all tokens before it.
Choose: TypeAlias = "Callable[[NDArray[np.float32], int, Sequence[int]], int]"
# Next token, and the output state of the row that it was drafted from.
_Drafted: TypeAlias = "tuple[Sequence[DraftedToken], NDArray[np.float32] | None]"


# A closed session leaves its rows behind. A later one of its client that begins with the same tokens, such as
# the next turn of a conversation or another with the same system prompt, reuses them.
class FreeSlot(NamedTuple):
    """A free slot and its content."""

    slot: int
    """The slot."""
    num_shared: int
    """Number of the session's first tokens whose rows it holds."""
    former: DraftSequence | None
    """Session of the same client that had it before."""


class _Held(NamedTuple):
    """Content of a free slot."""

    tokens: Sequence[int] = ()
    """Tokens of its rows."""
    client: str | None = None
    """Client of the session that computed them."""
    former: DraftSequence | None = None
    """That session; None for none."""

    def num_shared(self, tokens: Sequence[int], client: str | None) -> int:
        """Number of first tokens whose rows a session of this client may reuse."""
        return _num_shared(self.tokens, tokens) if client == self.client else 0

    def num_rows(self, num_shared: int) -> int:
        """Number of rows of these first tokens: those that read features may begin late."""
        return num_shared if self.former is None else max(0, num_shared - self.former.first_row)


class DraftSlots:
    """Free slots and their content.

    Rows are reused only within one client: how soon the first draft comes shows what is there.

    Args:
        num_slots: Number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._held: dict[int, _Held] = {slot: _Held() for slot in range(num_slots)}

    def take(self, tokens: Sequence[int], client: str | None = None) -> FreeSlot | None:
        """The free slot with most rows of a prefix of `tokens`, this client's; None if none is free."""
        shared = {slot: held.num_shared(tokens, client) for slot, held in self._held.items()}
        if not shared:
            return None
        slot = max(shared, key=lambda slot: self._held[slot].num_rows(shared[slot]))
        held = self._held.pop(slot)
        return FreeSlot(slot, shared[slot], held.former if held.client == client else None)

    def give_back(
        self,
        slot: int,
        tokens: Sequence[int],
        former: DraftSequence | None = None,
        client: str | None = None,
    ) -> None:
        """Free a slot, which holds the rows of `tokens`, a part of `former`'s text, of this client."""
        self._held[slot] = _Held(tuple(tokens), client, former)


class ThreadPriority:
    """Scheduling priority of one thread.

    Linux schedules each thread by itself, but only privileged processes (or those with a suitable limit) may
    raise a priority again. Elsewhere the priority does not change.

    Args:
        thread_id: The kernel's thread id.
        niceness: How much it always yields to others, 0 to 18.

    Attributes:
        can_be_lowered: Whether `lowered` has any effect.
    """

    def __init__(self, thread_id: int, niceness: int) -> None:
        self._thread_id = thread_id
        self._is_low = False
        # Where the second step is refused the first remains; so it is a small one.
        self.can_be_lowered = (
            self._be_nice(niceness) and self._be_nice(niceness + 1) and self._be_nice(niceness)
        )

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Run only on otherwise idle processors for the block, or until `raise_again`.

        Hold no lock in it, the interpreter's included, for longer than a moment: waiting threads would be
        delayed by all other processes.
        """
        if self.can_be_lowered:
            self._is_low = True
            self._schedule(is_idle=True)
        try:
            yield
        finally:
            self.raise_again()

    def raise_again(self) -> None:
        """End the block's effect; any thread may call it."""
        if self._is_low:
            self._is_low = False
            self._schedule(is_idle=False)

    def _be_nice(self, niceness: int) -> bool:
        if sys.platform != "linux":
            return False
        try:
            os.setpriority(os.PRIO_PROCESS, self._thread_id, niceness)
        except OSError:
            return False
        return True

    def _schedule(self, *, is_idle: bool) -> None:
        # Unlike a thread of low priority, an idle one is preempted at once.
        if sys.platform == "linux":
            policy = os.SCHED_IDLE if is_idle else os.SCHED_OTHER
            # The process of an isolated context may have ended, which its next answer tells.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(self._thread_id, policy, os.sched_param(0))


@dataclass(eq=False)
class DraftSession:
    """One session of the thread. Changed under the thread's lock only."""

    sequence: DraftSequence
    """Its text."""
    choose: Choose
    """Returns the token for a position, given the logits and the tokens before it."""
    client: str | None = None
    """Its client, whose sessions reuse each other's rows; None where the API is open."""
    replace: Replace | None = None
    """What is proposed instead of what was drafted; None for the drafter's own tokens."""
    on_ready: Callable[[], None] | None = None
    """Called when a short proposal would now be longer."""
    slot: int | None = None
    """Its sequence in the KV cache, once it has computed anything."""
    error: Exception | None = None
    """Reason why it drafts no more."""


class _Part(NamedTuple):
    session: DraftSession
    span: DraftSpan


class DraftThread:
    """The drafting thread, which owns the context while it runs.

    Args:
        context: The loaded drafter; not closed here.
        options: Number of sessions, and niceness.
        clock_s: Monotonic clock, seconds.

    Attributes:
        ms_per_token: Time of a drafted token, a running mean.
        tokens_per_pass: Tokens that are drafted for a session at once, likewise.
        failure: Error that nothing expected, after which it drafts no more; None while it works.
    """

    def __init__(self, context: Context, options: DraftOptions, clock_s: Callable[[], float]) -> None:
        self.ms_per_token = context.ms_per_token
        self.tokens_per_pass = float(context.most_drafted)
        self._pass_times = BatchTimeModel()
        self._pass_times.add(context.most_drafted, context.most_drafted * context.ms_per_token)
        self._context = context
        self._clock_s = clock_s
        self._slots = DraftSlots(options.num_sessions)
        self._sessions: list[DraftSession] = []
        self._running: list[DraftSession] = []
        self._is_closing = False
        self.failure: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
        # A thread has no id before it runs, and must not run before its priority is set.
        with self._changed:
            self._thread.start()
            thread_id = context.thread_id or self._thread.native_id or 0
            self._priority = ThreadPriority(thread_id, options.niceness)

    @property
    def cost(self) -> DraftCost:
        """What it costs, as measured."""
        if self._context.most_drafted == 1:
            return DraftCost(self.ms_per_token)
        lone_ms, several_ms = self._pass_times.ms(1), self._pass_times.ms(1 + _NUM_COMPARED_ROWS)
        row_ms = ((several_ms or 0.0) - (lone_ms or 0.0)) / _NUM_COMPARED_ROWS
        return DraftCost(self.ms_per_token, self.tokens_per_pass, row_ms)

    @property
    def num_sessions(self) -> int:
        """Sessions that were added, and not removed."""
        return len(self._sessions)

    def add(self, session: DraftSession) -> None:
        """Add a session."""
        with self._changed:
            self._sessions.append(session)

    def remove(self, session: DraftSession) -> None:
        """Remove a session, at any time, also while it is computed. Later calls have no effect."""
        with self._changed:
            if session not in self._sessions:
                return
            self._sessions.remove(session)
            session.sequence.dropped()
            if session.slot is not None:
                sequence = session.sequence
                reusable = sequence.tokens[: sequence.num_reusable]
                self._slots.give_back(session.slot, reusable, sequence, session.client)
            self._abort_if_in_vain()

    @contextlib.contextmanager
    def text_of(self, session: DraftSession) -> Iterator[DraftSequence]:
        """Read and change a session's text; never waits for a computation.

        Raises:
            Exception: The error that ended the session's drafting, if there was one.
        """
        with self._changed:
            if (error := session.error or self.failure) is not None:
                raise error
            yield session.sequence
            self._abort_if_in_vain()
            if session.sequence.is_urgent:
                self._priority.raise_again()
            self._changed.notify()

    def close(self) -> None:
        """End the thread at once. The context may be closed afterwards."""
        with self._changed:
            self._is_closing = True
            self._abort()
            self._changed.notify()
        self._thread.join()

    def _abort_if_in_vain(self) -> None:
        """Abort a decode that is of no use any more: after a rejection the next one is urgent."""
        running = self._running
        if running and all(
            session not in self._sessions or session.sequence.is_running_in_vain for session in running
        ):
            self._abort()

    def _abort(self) -> None:
        self._context.abort()
        # Otherwise it may be long before the thread notices.
        self._priority.raise_again()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, each session is to be told
            with self._changed:
                self.failure = error

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (parts := self._next_parts()) and not self._is_closing:
                    self._changed.wait()
                if self._is_closing:
                    return
                self._running = [part.session for part in parts]
                self._context.resume()
            self._compute(parts)

    def _next_parts(self) -> list[_Part]:
        # Rotates the sessions: the first of the last batch is the last of this one.
        self._sessions[:] = [*self._sessions[1:], *self._sessions[:1]]
        able = [session for session in self._sessions if session.error is None]
        parts = self._parts_of([session for session in able if session.sequence.is_urgent], MAX_ROWS)
        # With several sessions no time is spent on tokens that may never be requested.
        if parts or len(able) > 1 or not self._priority.can_be_lowered:
            return parts
        return self._parts_of(able, MAX_ROWS_UNASKED)

    def _parts_of(self, able: Sequence[DraftSession], max_rows: int) -> list[_Part]:
        granted = share_rows([session.sequence.num_wanted_rows for session in able], max_rows)
        parts = []
        for session, num_rows in zip(able, granted, strict=True):
            if num_rows and self._has_slot(session) and (span := session.sequence.next_span(num_rows)):
                parts.append(_Part(session, span))
        return parts

    def _has_slot(self, session: DraftSession) -> bool:
        if session.slot is None:
            free = self._slots.take(session.sequence.tokens, session.client)
            if free is not None:
                session.slot = free.slot
                self._adopt(session, free)
        return session.slot is not None

    def _adopt(self, session: DraftSession, free: FreeSlot) -> None:
        """Reuse rows of the same beginning: those in the slot, or more that a session of the client has."""
        tokens = session.sequence.tokens
        best, source, num_shared = free.former, None, free.num_shared
        num_rows = num_shared if best is None else num_shared - best.first_row
        for other in self._sessions:
            if other is session or other.slot is None or other.client != session.client:
                continue
            shared = min(_num_shared(other.sequence.tokens, tokens), other.sequence.num_reusable)
            if shared - other.sequence.first_row > num_rows:
                best, source, num_shared = other.sequence, other.slot, shared
                num_rows = shared - other.sequence.first_row
        session.sequence.adopt(num_shared, best)
        if source is not None:
            self._context.copy(source, free.slot, session.sequence.num_cached)

    def _compute(self, parts: Sequence[_Part]) -> None:
        started_s = self._clock_s()
        drafted, error = self._draft(parts)
        elapsed_ms = (self._clock_s() - started_s) * 1000
        with self._changed:
            self._running = []
            left = [part.session for part in parts if part.session in self._sessions]
            if drafted is None:
                told = left if error is not None else []
                for session in left:
                    session.sequence.dropped()
                    session.error = session.error or error
            else:
                told = [session for session in left if session.sequence.computed(*drafted[session])]
                # A session drafts a token, or a block of them. Where more is read, that takes the time.
                counts = [len(tokens) for tokens, _ in drafted.values()]
                num_drafted = max([1, *counts])
                if all(len(part.span.tokens) <= num_drafted for part in parts):
                    self._note_pass(num_drafted, sum(counts), elapsed_ms)
        for session in told:
            # Outside the lock: the listener may request a proposal at once.
            _notify(session)

    def _note_pass(self, num_drafted: int, num_in_all: int, elapsed_ms: float) -> None:
        """Learn what a pass takes, given the tokens of a session and of all of them."""
        self.ms_per_token = moved(self.ms_per_token, elapsed_ms / num_drafted, _NEWEST_WEIGHT)
        self.tokens_per_pass = moved(self.tokens_per_pass, num_drafted, _NEWEST_WEIGHT)
        if num_in_all:
            self._pass_times.add(num_in_all, elapsed_ms)

    def _draft(self, parts: Sequence[_Part]) -> tuple[dict[DraftSession, _Drafted] | None, Exception | None]:
        """Result for each session; None if nothing was computed, with the failure if there was one."""
        rows = [SlotRows(part.session.slot or 0, part.span) for part in parts]
        is_awaited = any(part.session.sequence.is_urgent for part in parts)
        try:
            outputs = self._context.decode(
                rows, contextlib.nullcontext() if is_awaited else self._priority.lowered()
            )
        except DraftUnusable as error:
            return None, error
        if outputs is None:
            return None, None
        num_tokens = self._context.num_tokens
        return {
            part.session: _result(part, output, num_tokens)
            for part, output in zip(parts, outputs, strict=True)
        }, None


class LoadedDrafter:
    """A loaded drafter, its thread, and its sessions. One for each coordinator.

    Args:
        file: The drafter.
        context: It in llama.cpp, which is closed with this.
        clock_s: Monotonic clock, seconds.
    """

    def __init__(self, file: DraftFile, context: Context, *, clock_s: Callable[[], float]) -> None:
        self._kind = file.kind
        self._options = file.options
        self._context = context
        self._thread = DraftThread(context, file.options, clock_s)

    @property
    def num_tokens(self) -> int:
        """Number of token ids, from 0, that it shares with the target."""
        return self._context.num_tokens

    @property
    def draft_ms_per_token(self) -> float:
        """Time of a drafted token, in ms: a running mean, of whole batches if several sessions draft."""
        return self._thread.ms_per_token

    @property
    def drafts_blocks(self) -> bool:
        """Whether it is of a kind that drafts several tokens in one pass."""
        return KINDS[self._kind].most_drafted > 1

    @property
    def is_alive(self) -> bool:
        """Whether it can draft: neither the process that computes nor the thread has ended."""
        return self._context.is_alive and self._thread.failure is None

    @property
    def num_open(self) -> int:
        """Sessions that are open."""
        return self._thread.num_sessions

    def open(
        self,
        choose: Choose,
        client: str | None = None,
        replace: Replace | None = None,
        number: int | None = None,
    ) -> DraftProposer:
        """A proposer for one session; at most `options.num_sessions` may be open at once.

        Args:
            choose: Returns the token for an absolute position, given the draft's logits before it, float32,
                shape (n_vocab,), and the tokens at all positions before it. Called on the draft's thread;
                must not keep the array. With the target's own sampler and seed the two share their noise.
            client: Client of the session, which reuses rows of the same client's sessions only; None where
                the API is open.
            replace: For benchmarks: what is proposed instead of what was drafted, after as much computing.
                Called on the draft's thread.
            number: Of the drafter, in the proposer's name; see `speculative.proposer.is_drafter`.
        """
        name = self._kind.proposer + ("" if number is None else f"/{number}")
        sequence = KINDS[self._kind].sequence(name, self._options, self._context)
        return DraftProposer(self._thread, DraftSession(sequence, choose, client, replace))

    def close(self) -> None:
        """End the thread at once and free all memory; proposers then propose nothing."""
        self._thread.close()
        self._context.close()


class DraftProposer:
    """Proposer for one session; see `speculative.proposer.Proposer`. From `LoadedDrafter.open`."""

    take_features: Callable[[int, NDArray[np.float32]], None]
    """Of drafters that read features only: see `speculative.proposer.FeatureReader`."""

    def __init__(self, thread: DraftThread, session: DraftSession) -> None:
        self.name = session.sequence.name
        self._thread = thread
        self._session = session
        if isinstance(session.sequence, FeatureReader):
            # No method bound to this object: it would keep itself, and its features, alive.
            self.take_features = partial(_take_features, thread, session, session.sequence)
        thread.add(session)

    @property
    def draft_cost(self) -> DraftCost:
        """What the drafter costs, as measured over all sessions."""
        return self._thread.cost

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens; little is computed until a proposal is requested."""
        with self._thread.text_of(self._session) as sequence:
            sequence.extend(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """Tokens drafted after `after` so far; the thread drafts on meanwhile."""
        with self._thread.text_of(self._session) as sequence:
            return sequence.propose(max_tokens, after)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Set the function that the draft's thread calls when a short proposal would now be longer."""
        with self._thread.text_of(self._session):
            self._session.on_ready = on_ready

    def close(self) -> None:
        """Remove the session, at any time."""
        self._thread.remove(self._session)


def share_rows(wanted: Sequence[int], max_rows: int) -> list[int]:
    """Number of rows for each session.

    A session that drafts needs a row or two, and waits for them; one whose prompt is still to be computed
    needs hundreds. So small requests are granted first, and beside them a prompt gets a small part of the
    batch only. Earlier sessions get more: the caller rotates them.

    Args:
        wanted: Number of rows that each session could use.
        max_rows: Rows of the batch.
    """
    granted = [rows if rows <= _FEW_ROWS else 0 for rows in wanted]
    room = max_rows
    for index, rows in enumerate(granted):
        granted[index] = min(rows, room)
        room -= granted[index]
    if any(granted):
        room = min(room, _MAX_ROWS_BESIDE_DRAFTS)
    for index, rows in enumerate(wanted):
        if rows > _FEW_ROWS:
            granted[index] = min(rows, room)
            room -= granted[index]
    return granted


def _num_shared(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    for start in range(0, shorter, _NUM_COMPARED):
        stop = min(start + _NUM_COMPARED, shorter)
        mine, others = tuple(left[start:stop]), tuple(right[start:stop])
        if mine != others:
            pairs = enumerate(zip(mine, others, strict=True), start)
            return next(index for index, (one, other) in pairs if one != other)
    return shorter


def _result(part: _Part, output: DraftOutput | None, num_tokens: int) -> _Drafted:
    """Next tokens and state."""
    return ((), None) if output is None else (_choose(part, output, num_tokens), output.state)


def _choose(part: _Part, output: DraftOutput, num_tokens: int) -> Sequence[DraftedToken]:
    """The tokens for the positions after the part's last row."""
    drafted: list[DraftedToken] = []
    try:
        # If the text changes meanwhile, the drafted tokens are dropped.
        before = part.session.sequence.tokens[: part.span.stop]
        for index in range(output.num_drafted):
            row = output.logits(index, before[-1], num_tokens)
            token = part.session.choose(row, part.span.stop + index, before)
            likelihood = probability(row, token)
            if output.confidences is not None:
                likelihood = float(output.confidences[index])
                if not 0.0 <= likelihood <= 1.0:
                    raise ValueError(f"the drafter is sure of token {token} to {likelihood}")  # noqa: TRY301
            drafted.append(DraftedToken(token, likelihood))
            before.append(token)
        if part.session.replace is not None:
            instead = part.session.replace(before[: part.span.stop], len(drafted))
            return [DraftedToken(token, likelihood) for token, likelihood in zip(*instead, strict=True)]
    except Exception as error:  # noqa: BLE001 - handed in from outside; it must not take the other sessions along
        part.session.error = error
        return ()
    return drafted


def _notify(session: DraftSession) -> None:
    try:
        if session.on_ready is not None:
            session.on_ready()
    except Exception as error:  # noqa: BLE001 - as above
        session.error = error


def _take_features(
    thread: DraftThread, session: DraftSession, reader: FeatureReader, start: int, rows: NDArray[np.float32]
) -> None:
    with thread.text_of(session):
        reader.take_features(start, rows)
