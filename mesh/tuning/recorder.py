"""Recorder: features and tokens of answers, on their way into a folder.

An answer hands over what it has once it has ended. A thread writes it; what does not fit into its bounded
memory is dropped and counted, so that no answer waits, and none fails because of a disk.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import structlog

from mesh.status import RecordingStatus
from mesh.tuning.conversation_file import Conversation, ConversationInfo
from mesh.tuning.recording import told_within
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from mesh.engine import GenerationRequest, RecordedPrompt
    from mesh.tuning.conversation_file import FeatureShape
    from mesh.tuning.recording_folder import RecordingFolder

# Positions of a prompt before the answer: with more of them drafters are not right more often.
CONTEXT: Final = 64
MOST_ANSWER_BYTES: Final = 64 << 20
"""Features of one answer: what follows is not recorded."""
_MOST_HELD_BYTES: Final = 256 << 20
# Rows that are joined and rounded at once: for each alone this takes longer than all else of a recording.
_ROWS_AT_ONCE: Final = 32
# Keys and ages are looked at again after this time.
_LOOK_S: Final = 2.0
_CLOSE_S: Final = 10.0

Result = TypeVar("Result")
Row = TypeVar("Row", np.float16, np.float32)

log = structlog.get_logger()


class RecordedAnswer:
    """One answer while it is generated. For the event loop.

    Args:
        recorder: Where it goes.
        request: Its request.
        recording: How it is filed.
    """

    context = CONTEXT
    """Number of the prompt's last positions whose features it wants."""
    features_may_wait = True
    """Features of several windows may share a message: they are read once the answer has ended."""

    def __init__(self, recorder: Recorder, request: GenerationRequest, recording: RecordedPrompt) -> None:
        self._recorder = recorder
        self._request = request
        self._recording = recording
        self._runs: list[tuple[int, NDArray[np.float16]]] = []
        self._fresh: list[tuple[int, NDArray[np.float32]]] = []
        self._num_fresh = self._num_bytes = 0
        self._is_full = False

    @property
    def wants_features(self) -> bool:
        """Whether there is room for more."""
        return not self._is_full

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        """Take features of committed positions.

        Args:
            start: Position of the first row.
            rows: float32 (rows, layers × n_embd).
        """
        first = len(self._request.prompt) - CONTEXT
        if start < first:
            start, rows = first, rows[first - start :]
        num_bytes = 2 * rows.size
        is_small = self._num_bytes + num_bytes <= MOST_ANSWER_BYTES
        if self._is_full or not (is_small and self._recorder.hold(num_bytes)):
            self._is_full = True
            return
        self._num_bytes += num_bytes
        self._fresh.append((start, rows))
        self._num_fresh += len(rows)
        if self._num_fresh >= _ROWS_AT_ONCE:
            self._round()

    def end(self, tokens: Sequence[int]) -> None:
        """Hand over what came, once the answer has ended.

        Args:
            tokens: Prompt and answer.
        """
        self._round()
        self._recorder.put(
            EndedAnswer(self._request, self._recording, tokens, tuple(self._runs), self._num_bytes)
        )

    def _round(self) -> None:
        largest = np.finfo(np.float16).max
        for start, rows in joined_runs(self._fresh):
            self._runs.append((start, np.clip(rows, -largest, largest).astype(np.float16)))
        self._fresh.clear()
        self._num_fresh = 0


@dataclass(frozen=True)
class EndedAnswer:
    """An answer on its way into the folder."""

    request: GenerationRequest
    """Its request."""
    recording: RecordedPrompt
    """How it is filed."""
    tokens: Sequence[int]
    """Prompt and answer."""
    runs: tuple[tuple[int, NDArray[np.float16]], ...]
    """Features of consecutive positions, in any order: the first position, and (rows, layers × n_embd)."""
    num_bytes: int
    """Size of the features."""

    @property
    def key_digest(self) -> str:
        """Digest of the API key in hex; empty without one."""
        # Of a key that was removed and came back, its identity says so behind the digest.
        return (self.request.client or "").partition("-")[0]

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - len(self.request.prompt)

    def conversation(self, shape: FeatureShape, now_s: float) -> Conversation | None:
        """What is written of it: of features with gaps, the longest run; None if no token follows from it.

        Args:
            shape: Sizes of the recording.
            now_s: Unix seconds.
        """
        num_prompt = len(self.request.prompt)
        if not self.runs:
            return None
        start, rows = max(joined_runs(self.runs), key=lambda run: len(run[1]))
        # The features of a position and the token behind it foretell the token after that.
        stop = min(start + len(rows), len(self.tokens) - 2)
        if stop <= max(start, num_prompt - 1):
            return None
        info = ConversationInfo(
            start,
            # Of an answer that is recorded from its middle on, what comes before is like a prompt.
            max(num_prompt, start + 1),
            self.recording.api,
            self.request.sampling.temperature,
            self.recording.id,
            self.key_digest,
            now_s,
        )
        tokens = np.array(self.tokens[: stop + 2], np.int32)
        features = rows[: stop - start].reshape(-1, shape.num_layers, shape.n_embd)
        return Conversation(info, tokens, features)


class Recorder:
    """Writer of answers, with a thread of its own.

    Args:
        folder: Where they go; closed with this.
        shape: Sizes of its conversations.
        agreed: Returns the digests of the API keys whose answers may be kept, in hex; None while they are not
            known, or where there are no keys. Called in the thread.
        most_bytes: Limit of the folder, for the status.
        now_s: Wall clock, Unix seconds.
        look_s: Time between two looks at keys and ages, in seconds.
    """

    def __init__(
        self,
        folder: RecordingFolder,
        shape: FeatureShape,
        agreed: Callable[[], frozenset[str] | None],
        *,
        most_bytes: int,
        now_s: Callable[[], float] = time.time,
        look_s: float = _LOOK_S,
    ) -> None:
        self._folder = folder
        self._shape = shape
        self._agreed = agreed
        self._now_s = now_s
        self._look_s = look_s
        self._status = RecordingStatus(id=folder.id, most_bytes=most_bytes)
        self._guard = threading.Lock()
        self._num_held_bytes = 0
        self._ended: queue.SimpleQueue[EndedAnswer | None] = queue.SimpleQueue()
        self._known: frozenset[str] | None = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def begin(self, request: GenerationRequest) -> RecordedAnswer | None:
        """The record of a new answer; None if it must not be recorded, or its prompt is not all tokens."""
        if request.recording is None or request.has_rows:
            return None
        return RecordedAnswer(self, request, request.recording)

    def hold(self, num_bytes: int) -> bool:
        """Whether there is memory for more features, which are counted from now on until they are written."""
        with self._guard:
            is_room = self._num_held_bytes + num_bytes <= _MOST_HELD_BYTES
            self._num_held_bytes += num_bytes if is_room else 0
        return is_room

    def put(self, answer: EndedAnswer) -> None:
        """Have an answer written."""
        self._ended.put(answer)

    def status(self) -> RecordingStatus:
        """Counts and sizes, for the status of the mesh."""
        return replace(self._status)

    def close(self) -> None:
        """Write what has ended, but not for long, and let others add to the folder."""
        self._ended.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with self._folder:
            self._tried(self._folder.look_through)
            while True:
                self._tried(self._look)
                self._count()
                try:
                    answer = self._ended.get(timeout=self._look_s)
                except queue.Empty:
                    continue
                if answer is None:
                    return
                self._take(answer)

    def _take(self, answer: EndedAnswer) -> None:
        written = self._tried(lambda: self._write(answer))
        self._status.written += bool(written)
        # Of an answer of one token nothing can be learned.
        self._status.left_out += not written and answer.num_answer_tokens > 1
        if written:
            self._status.off = None
        with self._guard:
            self._num_held_bytes -= answer.num_bytes

    def _write(self, answer: EndedAnswer) -> bool:
        """Whether there is something of it to write."""
        if answer.key_digest and answer.key_digest not in (self._known or ()):
            # A key may be new, or have been removed while its answer was under way.
            self._look()
            if answer.key_digest not in (self._known or ()):
                return False
        conversation = answer.conversation(self._shape, self._now_s())
        if conversation is not None:
            self._folder.add(conversation)
        return conversation is not None

    def _look(self) -> None:
        """Erase what must not be kept any more."""
        agreed = self._agreed()
        if agreed is not None and agreed != self._known:
            self._status.erased += self._folder.erase_others(agreed)
            self._known = agreed
        self._status.erased += self._folder.erase_old(self._now_s())

    def _count(self) -> None:
        folder, status = self._folder, self._status
        status.conversations, status.tokens, status.bytes = len(folder), folder.num_tokens, folder.num_bytes

    def _tried(self, work: Callable[[], Result]) -> Result | None:
        """Result of a function; None if it failed, which concerns no answer."""
        try:
            return work()
        except MeshError as error:
            self._fail(error.message)
        except OSError as error:
            self._fail(f"{error.filename or 'the folder'}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, other answers can be written
            self._fail(repr(error))
        return None

    def _fail(self, reason: str) -> None:
        shown = told_within(reason, self._folder.path)
        if shown != self._status.off:
            self._status.off = shown
            # The log may go to the same full disk.
            with contextlib.suppress(OSError):
                log.warning("recording_failed", reason=reason)


def joined_runs(runs: Sequence[tuple[int, NDArray[Row]]]) -> list[tuple[int, NDArray[Row]]]:
    """Runs of which none overlap, in ascending order, those joined that follow one another.

    Args:
        runs: First position and rows of each, in any order.
    """
    joined: list[list[tuple[int, NDArray[Row]]]] = []
    stop = -1
    for start, rows in sorted(runs, key=lambda run: run[0]):
        if start != stop:
            joined.append([])
        joined[-1].append((start, rows))
        stop = start + len(rows)
    return [(parts[0][0], np.concatenate([rows for _, rows in parts])) for parts in joined]
