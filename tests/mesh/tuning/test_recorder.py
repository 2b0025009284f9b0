"""Recorder: what it writes of answers, what it leaves out, and what it erases."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.engine import GenerationRequest, RecordedPrompt
from mesh.tuning import recorder as recorder_module
from mesh.tuning.conversation_file import read_conversation
from mesh.tuning.recorder import CONTEXT, Recorder
from mesh.tuning.recording import RecordedModel, RecordingHeader, conversation_path, conversation_paths
from mesh.tuning.recording_folder import (
    RecordingFolder,
    RecordingLimits,
    erase_key,
    recorded_prompts,
    writer_of,
)
from spanmesh_proto.errors import ClusterError
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.tuning.conversation_file import Conversation

MODEL = RecordedModel("aa", "llama", n_layers=30, n_embd=4, n_vocab=1000, tokenizer_digest="bb")
HEADER = RecordingHeader(MODEL, (2, 15, 27))
WIDTH = 12
PROMPT = tuple(range(100, 170))
ANSWER = tuple(range(500, 520))
LIMITS = RecordingLimits(1 << 20, days=30)
ALICE, BOB = "a" * 64, "b" * 64


class Keys:
    """A key file that a test edits."""

    def __init__(self, *agreed: str) -> None:
        self.agreed: frozenset[str] | None = frozenset(agreed) or None

    def __call__(self) -> frozenset[str] | None:
        return self.agreed


class Setting:
    """A recorder of a folder."""

    def __init__(self, folder: Path, recorder: Recorder) -> None:
        self.folder = folder
        self.recorder = recorder

    def record(
        self,
        *runs: tuple[int, int],
        client: str | None = None,
        name: str = "prompt",
        answer: tuple[int, ...] = ANSWER,
    ) -> None:
        """An answer with features of these positions."""
        request = GenerationRequest(
            PROMPT,
            64,
            sampling=SamplingParams(temperature=0.5, seed=1),
            client=client,
            recording=RecordedPrompt("chat", name),
        )
        found = self.recorder.begin(request)
        assert found is not None
        for start, stop in runs or ((0, len(PROMPT) + len(answer)),):
            found.take_features(start, rows(start, stop))
        found.end((*PROMPT, *answer))

    def conversations(self) -> list[Conversation]:
        return [read_conversation(path, HEADER.shape) for path in conversation_paths(self.folder)]

    def until(self, is_so: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < deadline_s, self.recorder.status()
            time.sleep(0.002)


def rows(start: int, stop: int) -> NDArray[np.float32]:
    """Rows that tell their position."""
    return np.repeat(np.arange(start, stop, dtype=np.float32)[:, None], WIDTH, axis=1)


@contextmanager
def recording(
    folder: Path,
    keys: Keys | None = None,
    *,
    limits: RecordingLimits = LIMITS,
    now_s: Callable[[], float] = lambda: 1000.0,
) -> Iterator[Setting]:
    opened = RecordingFolder(folder, HEADER, limits, one_bytes=1)
    recorder = Recorder(
        opened, HEADER.shape, keys or Keys(), most_bytes=limits.most_bytes, now_s=now_s, look_s=0.01
    )
    try:
        yield Setting(folder, recorder)
    finally:
        recorder.close()


def test_an_answer_is_written_with_what_is_known_of_it(tmp_path: Path) -> None:
    with recording(tmp_path / "of") as setting:
        setting.record(name="own-3")
    (found,) = setting.conversations()
    # The last two positions foretell no token of the answer.
    assert list(found.token_ids) == [*PROMPT, *ANSWER]
    start = len(PROMPT) - CONTEXT
    wanted = rows(start, len(PROMPT) + len(ANSWER) - 2).astype(np.float16).reshape(-1, 3, 4)
    assert np.array_equal(found.features, wanted)
    info = found.info
    assert (info.start, info.answer_start, info.api) == (start, len(PROMPT), "chat")
    assert (info.temperature, info.prompt_id, info.key_digest, info.time_s) == (0.5, "own-3", "", 1000.0)
    assert recorded_prompts(setting.folder) == ["own-3"]
    (path,) = conversation_paths(setting.folder)
    assert path.stat().st_mode & 0o777 == 0o600
    status = setting.recorder.status()
    assert (status.written, status.conversations, status.tokens) == (1, 1, len(ANSWER))
    assert status.bytes == path.stat().st_size
    assert status.off is None


def test_of_features_with_a_gap_the_longest_run_is_kept(tmp_path: Path) -> None:
    with recording(tmp_path / "of") as setting:
        # In any order, as they come from stages: a gap at 74.
        setting.record((80, 88), (60, 74), (75, 80))
        setting.record((0, 60))
        setting.record(answer=(500,))
    (found,) = setting.conversations()
    assert (found.info.start, found.info.answer_start) == (60, 70)
    assert list(found.token_ids) == [*PROMPT, *ANSWER][:76]
    assert np.array_equal(found.features[:, 0, 0], np.arange(60, 74))
    # Of the second no token of the answer follows; of the third there is nothing to learn.
    assert setting.recorder.status().left_out == 1


def test_a_run_within_an_answer_begins_with_what_is_like_a_prompt(tmp_path: Path) -> None:
    with recording(tmp_path / "of") as setting:
        setting.record((72, 90))
    (found,) = setting.conversations()
    assert (found.info.start, found.info.answer_start) == (72, 73)
    assert len(found.features) == 16


def test_what_must_not_be_recorded_is_not(tmp_path: Path) -> None:
    with recording(tmp_path / "of") as setting:
        assert setting.recorder.begin(GenerationRequest(PROMPT, 4)) is None
        picture = GenerationRequest((5, FIRST_ROW_ID + 7), 4, recording=RecordedPrompt("chat", "x"))
        assert setting.recorder.begin(picture) is None


def test_the_oldest_answers_make_room_for_the_latest(tmp_path: Path) -> None:
    with recording(tmp_path / "of") as setting:
        setting.record()
        setting.until(lambda: setting.recorder.status().written)
        one_bytes = setting.recorder.status().bytes
    limits = RecordingLimits(3 * one_bytes + 50, days=30)
    with recording(tmp_path / "of", limits=limits) as setting:
        for _ in range(4):
            setting.record()
    assert [path.stem for path in conversation_paths(setting.folder)] == ["00000002", "00000003", "00000004"]
    status = setting.recorder.status()
    assert (status.conversations, status.bytes, status.left_out) == (3, 3 * one_bytes, 0)


def test_an_answer_that_is_larger_than_all_is_left_out(tmp_path: Path) -> None:
    with recording(tmp_path / "of", limits=RecordingLimits(1000, days=30)) as setting:
        setting.record()
    assert setting.conversations() == []
    status = setting.recorder.status()
    assert status.left_out == 1
    assert "more than --record-limit" in (status.off or "")


def test_answers_of_old_days_are_erased(tmp_path: Path) -> None:
    now_s = [1000.0]
    with recording(tmp_path / "of", limits=RecordingLimits(1 << 20, 1.0), now_s=lambda: now_s[0]) as setting:
        setting.record(name="old")
        setting.until(lambda: setting.recorder.status().written)
        now_s[0] += 80_000
        setting.record(name="new")
        setting.until(lambda: setting.recorder.status().written == 2)
        now_s[0] += 10_000
        setting.until(lambda: setting.recorder.status().erased == 1)
        assert recorded_prompts(setting.folder) == ["new"]
        # The clock was wrong before.
        now_s[0] -= 50_000
        setting.record(name="earlier")
        setting.until(lambda: setting.recorder.status().written == 3)
        now_s[0] += 90_000
        setting.until(lambda: setting.recorder.status().erased == 2)
        assert recorded_prompts(setting.folder) == ["new"]


def test_with_a_key_its_answers_go_also_those_under_way(tmp_path: Path) -> None:
    keys = Keys(ALICE, BOB)
    with recording(tmp_path / "of", keys) as setting:
        setting.record(client=ALICE, name="a")
        setting.record(client=BOB, name="b")
        setting.record(name="nobody's")
        setting.until(lambda: setting.recorder.status().written == 3)
        keys.agreed = frozenset({BOB})
        setting.until(lambda: setting.recorder.status().erased == 1)
        # It had begun before; and the key that comes back has another identity.
        setting.record(client=ALICE, name="a")
        setting.record(client=f"{ALICE}-1", name="a")
        setting.until(lambda: setting.recorder.status().left_out == 2)
        assert sorted(recorded_prompts(setting.folder)) == ["b", "nobody's"]
        # While the file cannot be read, no key counts as removed.
        keys.agreed = None
        setting.record(client=BOB, name="b")
        setting.until(lambda: setting.recorder.status().written == 4)


def test_a_key_that_was_removed_meanwhile_leaves_nothing_at_the_next_start(tmp_path: Path) -> None:
    with recording(tmp_path / "of", Keys(ALICE, BOB)) as setting:
        setting.record(client=ALICE)
        setting.record(client=BOB)
    assert len(setting.conversations()) == 2
    with recording(tmp_path / "of", Keys(BOB)) as setting:
        setting.until(lambda: setting.recorder.status().erased == 1)
    assert [each.info.key_digest for each in setting.conversations()] == [BOB]
    assert erase_key(setting.folder, ALICE) == 0
    assert erase_key(setting.folder, BOB) == 1
    assert setting.conversations() == []


def test_a_new_key_is_known_at_once(tmp_path: Path) -> None:
    keys = Keys(ALICE)
    with recording(tmp_path / "of", keys) as setting:
        setting.until(lambda: setting.recorder.status().id)
        keys.agreed = frozenset({ALICE, BOB})
        setting.record(client=BOB)
    assert setting.recorder.status().written == 1


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_the_answer_that_does_not_fit(tmp_path: Path) -> None:
    with recording(tmp_path / "of") as setting:
        with full_disk():
            setting.record(name="lost")
            setting.until(lambda: setting.recorder.status().left_out == 1)
        assert "File too large" in (setting.recorder.status().off or "")
        assert {path.name for path in setting.folder.iterdir()} == {"recording.json", "lock"}
        setting.record(name="kept")
        setting.until(lambda: setting.recorder.status().written == 1)
        assert setting.recorder.status().off is None
    assert recorded_prompts(setting.folder) == ["kept"]


def test_a_removed_folder_costs_answers_and_nothing_else(tmp_path: Path) -> None:
    with recording(tmp_path / "of") as setting:
        shutil.rmtree(setting.folder)
        setting.record()
        setting.until(lambda: setting.recorder.status().left_out == 1)
        off = setting.recorder.status().off or ""
        assert "No such file" in off
        # A status is for all keys.
        assert str(tmp_path) not in off


_KILLED_WHILE_WRITING = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from mesh.tuning.conversation_file import Conversation, ConversationInfo, write_conversation
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
info = ConversationInfo(0, 1, "chat", 0.0, "killed", "", 1.0)
write_conversation(Path(sys.argv[1]), Conversation(info, np.arange(90, dtype=np.int32),
    np.zeros((80, 3, 4), np.float16)))
"""


def test_what_a_crash_has_left_half_is_removed(tmp_path: Path) -> None:
    with recording(tmp_path / "of") as setting:
        setting.record(name="whole")
        setting.record(name="cut")
    folder = setting.folder
    first, second = conversation_paths(folder)
    # A power cut may leave a file that ends early.
    second.write_bytes(second.read_bytes()[:-100])
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED_WHILE_WRITING, str(conversation_path(folder, 2))], check=False
    )
    assert killed.returncode == -signal.SIGXFSZ
    assert len(list(folder.glob(".*.part"))) == 1
    assert recorded_prompts(folder) == ["whole"]
    with recording(folder) as setting:
        setting.record(name="next")
    assert list(folder.glob(".*.part")) == []
    assert recorded_prompts(folder) == ["whole", "next"]
    assert conversation_paths(folder) == [first, conversation_path(folder, 2)]


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path: Path) -> None:
    keys = Keys(ALICE, BOB)
    with recording(tmp_path / "of", keys) as setting:
        for client in (ALICE, BOB, ALICE):
            setting.record(client=client)
        setting.until(lambda: setting.recorder.status().written == 3)
        first, second, third = conversation_paths(setting.folder)
        first.unlink()
        first.mkdir()
        keys.agreed = frozenset({BOB})
        setting.until(lambda: "00000000.feat" in (setting.recorder.status().off or ""))
        assert not third.exists()
        assert second.exists()
    keys.agreed = frozenset({ALICE})
    # Nor does it at a start, where it is no conversation.
    with recording(tmp_path / "of", keys) as setting:
        setting.record(client=ALICE)
        setting.until(lambda: setting.recorder.status().written == 1)
        assert conversation_paths(setting.folder) == [first, conversation_path(setting.folder, 2)]


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of each answer twenty rows fit, and forty of all.
    monkeypatch.setattr(recorder_module, "MOST_ANSWER_BYTES", 20 * 2 * WIDTH)
    monkeypatch.setattr(recorder_module, "_MOST_HELD_BYTES", 40 * 2 * WIDTH)
    with recording(tmp_path / "of") as setting:
        request = GenerationRequest(PROMPT, 64, recording=RecordedPrompt("raw", "x"))
        answers = [setting.recorder.begin(request) for _ in range(3)]
        for position in range(60, 85):
            for answer in answers:
                assert answer is not None
                answer.take_features(position, rows(position, position + 1))
        assert [answer.wants_features for answer in answers if answer is not None] == [False] * 3
        for answer in answers:
            assert answer is not None
            answer.end((*PROMPT, *ANSWER))
        setting.until(lambda: setting.recorder.status().written == 3)
        assert sum(len(each.features) for each in setting.conversations()) == 40
        # What was written has left the memory.
        setting.until(lambda: setting.recorder.hold(40 * 2 * WIDTH))


def test_one_process_adds_to_a_folder(tmp_path: Path) -> None:
    with recording(tmp_path / "of") as setting:
        assert writer_of(setting.folder) == setting.recorder.status().id
        with pytest.raises(ClusterError, match="recorded into by another process"):
            RecordingFolder(setting.folder, HEADER, LIMITS, one_bytes=1)
    with recording(tmp_path / "of") as again:
        assert again.recorder.status().id != setting.recorder.status().id
    assert writer_of(tmp_path) is None


def test_a_limit_that_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"--record-limit is .* of one answer may take"):
        RecordingFolder(tmp_path / "of", HEADER, RecordingLimits(1000, 30), one_bytes=1001)
    most_bytes = shutil.disk_usage(tmp_path).total
    with pytest.raises(ClusterError, match=r"--record-limit is .* has room for"):
        RecordingFolder(tmp_path / "of", HEADER, RecordingLimits(most_bytes, 30), one_bytes=1)
    # Neither holds the lock any more.
    RecordingFolder(tmp_path / "of", HEADER, LIMITS, one_bytes=1).close()
