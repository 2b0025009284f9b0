"""Recorded answers: an index of recordings, and its split by prompt into what is learned and what is not."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from mesh.tuning.conversation_file import read_conversation, read_tokens
from mesh.tuning.recording import conversation_paths, read_recording_header, require_same
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from mesh.tuning.conversation_file import ConversationInfo, FeatureShape
    from mesh.tuning.recording import RecordingHeader

# Held out for the report, and watched for early stop, which chooses the weights: figures of the watched ones
# would be too good.
_HELD_SHARE: Final = 0.15
_WATCHED_SHARE: Final = 0.08
LEAST_PROMPTS: Final = 10
"""Fewer cannot be split."""


@dataclass(frozen=True, eq=False)
class RecordedAnswer:
    """A conversation of a recording, without its features."""

    path: Path
    info: ConversationInfo
    token_ids: NDArray[np.int32]
    """Of prompt and answer."""
    prompts: frozenset[int]
    """Hashes of its prompt's names: clients may ask the same under several."""

    @property
    def prompt_id(self) -> str:
        """Name of its prompt; its own where that has none."""
        return _prompt_name(self.info, self.path)

    @property
    def prompt(self) -> int:
        """The least hash of its prompt's names, which all answers to the prompt share."""
        return min(self.prompts)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Tokens of the answer."""
        return self.token_ids[self.info.answer_start :]


@dataclass(frozen=True)
class AnswerChoice:
    """Some answers of a recording."""

    keys: frozenset[str]
    """Digests of their API keys, in hex; empty for those without one."""
    latest_s: float
    """When the latest of them ended, Unix seconds: numbers of files may begin anew."""

    def has(self, info: ConversationInfo) -> bool:
        """Whether a conversation is one of them."""
        return info.key_digest in self.keys and info.time_s <= self.latest_s


@dataclass(frozen=True)
class AnswerCount:
    """Answers of some API keys."""

    num_tokens: int
    """Tokens of those that are new."""
    prompts: frozenset[int]
    """Hashes of the prompts of all."""
    choice: AnswerChoice
    """All of them."""


class _Counted(NamedTuple):
    key: str
    num_tokens: int
    prompt: int
    """Hash of its prompt."""
    time_s: float


class AnswerCounts:
    """Counts of a recording to which others add; each conversation is read once, without its features.

    Args:
        folder: The recording.
        shape: Of its conversations.
    """

    def __init__(self, folder: Path, shape: FeatureShape) -> None:
        self._folder = folder
        self._shape = shape
        # By the name of the conversation; None for one that is damaged.
        self._known: dict[str, _Counted | None] = {}

    def count(self, keys: frozenset[str], behind_s: float) -> AnswerCount:
        """Count answers.

        Args:
            keys: Digests of API keys, in hex; empty for answers without one.
            behind_s: A time, in Unix seconds: answers that ended later are new.

        Raises:
            ModelError: If the folder cannot be read.
        """
        paths = {path.name: path for path in conversation_paths(self._folder)}
        self._known = {name: self._known[name] for name in paths if name in self._known}
        for name, path in paths.items():
            if name not in self._known:
                self._known[name] = self._read(path)
        found = [each for each in self._known.values() if each is not None and each.key in keys]
        latest_s = max((each.time_s for each in found), default=behind_s)
        return AnswerCount(
            num_tokens=sum(each.num_tokens for each in found if each.time_s > behind_s),
            prompts=frozenset(each.prompt for each in found),
            choice=AnswerChoice(frozenset(each.key for each in found), latest_s),
        )

    def _read(self, path: Path) -> _Counted | None:
        try:
            found = read_tokens(path, self._shape)
        except ModelError:
            return None
        info = found.info
        prompt = prompt_hash(_prompt_name(info, path))
        return _Counted(info.key_digest, found.num_answer_tokens, prompt, info.time_s)


@dataclass(frozen=True, eq=False)
class AnswerIndex:
    """Answers of one or several recordings of one model."""

    shape: FeatureShape
    answers: tuple[RecordedAnswer, ...]
    """Oldest first, folder by folder."""
    num_dropped: int
    """Conversations that are damaged, or hold values that are no numbers."""


@dataclass(frozen=True, eq=False)
class Split:
    """Answers by their use; all answers to a prompt have the same."""

    learned: tuple[RecordedAnswer, ...]
    watched: tuple[RecordedAnswer, ...]
    """For early stop."""
    held: tuple[RecordedAnswer, ...]
    """For the report."""


class _Read(NamedTuple):
    """What is kept of a file; fields as those of `RecordedAnswer`."""

    path: Path
    info: ConversationInfo
    token_ids: NDArray[np.int32]


def index_answers(
    folders: Sequence[Path], wanted: RecordingHeader, choice: AnswerChoice | None = None
) -> AnswerIndex:
    """Read all conversations once, and keep what is small of them.

    Args:
        folders: The recordings.
        wanted: Model and layers that they have to be of.
        choice: Those that count; all unless given.

    Raises:
        ModelError: If one is of another model or layers, or none has a conversation.
    """
    found: list[_Read] = []
    num_dropped = 0
    for folder in folders:
        require_same(read_recording_header(folder), wanted, folder)
        for path in conversation_paths(folder):
            try:
                if choice is not None and not choice.has(read_tokens(path, wanted.shape).info):
                    continue
                conversation = read_conversation(path, wanted.shape)
            except ModelError:
                num_dropped += 1
                continue
            found.append(_Read(path, conversation.info, conversation.token_ids))
    if not found:
        dropped = f" that is whole, and {num_dropped} that are damaged" if num_dropped else ""
        raise ModelError(
            f"{', '.join(map(str, folders))}: no conversation{dropped}; record some with `mesh draft record`"
        )
    prompts = _prompts_of(found)
    answers = tuple(RecordedAnswer(*read, names) for read, names in zip(found, prompts, strict=True))
    return AnswerIndex(wanted.shape, answers, num_dropped)


def prompt_hash(prompt_id: str) -> int:
    """A number of 32 bits by which prompts are split, and known again."""
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:4], "little")


def split_by_prompt(answers: Sequence[RecordedAnswer], known: Collection[int]) -> Split:
    """Split answers by the hash of their prompts: the same recording is always split alike.

    Args:
        answers: The answers.
        known: Hashes of prompts that the drafter has learned before, which are learned again.

    Raises:
        ModelError: If there are too few prompts.
    """
    learned_before = {answer.prompt for answer in answers if not answer.prompts.isdisjoint(known)}
    hashes = sorted({answer.prompt for answer in answers} - learned_before)
    if len(hashes) < LEAST_PROMPTS:
        new = "new " if known else ""
        raise ModelError(
            f"the recording has {len(hashes)} {new}prompts, need {LEAST_PROMPTS}: record more with "
            "`mesh draft record`"
        )
    num_held = math.ceil(_HELD_SHARE * len(hashes))
    num_watched = math.ceil(_WATCHED_SHARE * len(hashes))
    held = set(hashes[:num_held])
    watched = set(hashes[num_held : num_held + num_watched])

    def of(wanted: Collection[int]) -> tuple[RecordedAnswer, ...]:
        return tuple(answer for answer in answers if answer.prompt in wanted)

    return Split(of({*learned_before, *hashes} - held - watched), of(watched), of(held))


def _prompt_name(info: ConversationInfo, path: Path) -> str:
    """Name of the prompt of a conversation; its file's where that has none."""
    return info.prompt_id or str(path)


def _prompts_of(answers: Sequence[_Read]) -> list[frozenset[int]]:
    """Hashes of all names of each answer's prompt; the same tokens asked under two names are one prompt."""
    roots: dict[int, int] = {}
    first: dict[bytes, int] = {}

    def root(of: int) -> int:
        while roots[of] != of:
            roots[of] = of = roots[roots[of]]
        return of

    hashes = [prompt_hash(_prompt_name(answer.info, answer.path)) for answer in answers]
    for answer, own in zip(answers, hashes, strict=True):
        roots.setdefault(own, own)
        asked = answer.token_ids[: answer.info.answer_start].tobytes()
        one, other = root(own), root(first.setdefault(asked, own))
        roots[max(one, other)] = min(one, other)
    names: dict[int, set[int]] = defaultdict(set)
    for each in roots:
        names[root(each)].add(each)
    return [frozenset(names[root(own)]) for own in hashes]
