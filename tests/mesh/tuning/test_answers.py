"""Indices of recordings, and their split by prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.tuning.answers import AnswerChoice, AnswerCounts, index_answers, prompt_hash, split_by_prompt
from mesh.tuning.conversation_file import write_conversation
from mesh.tuning.recording import (
    RecordingHeader,
    conversation_path,
    read_recording_header,
    recorded_model,
)
from spanmesh_proto.errors import ModelError
from tests.support.recordings import random_conversation, write_recording
from tests.support.tiny_eagle3 import LAYERS
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

NUM_PROMPTS = 40


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    target = TinyModel("llama").write(tmp_path / "target.gguf")
    conversations = [random_conversation(number) for number in range(NUM_PROMPTS)]
    return write_recording(tmp_path / "recording", target, conversations)


@pytest.fixture(name="header")
def _header(folder: Path) -> RecordingHeader:
    return read_recording_header(folder)


def test_prompts_are_split_alike_each_time(folder: Path, header: RecordingHeader) -> None:
    index = index_answers([folder], header)
    split = split_by_prompt(index.answers, ())
    assert [len(part) for part in (split.learned, split.watched, split.held)] == [30, 4, 6]
    again = split_by_prompt(index.answers[::-1], ())
    assert {answer.path for answer in again.held} == {answer.path for answer in split.held}
    # All answers to a prompt are in one part.
    twice = index_answers([folder, folder], header)
    both = split_by_prompt(twice.answers, ())
    assert {answer.path for answer in both.held} == {answer.path for answer in split.held}
    assert len(both.held) == 2 * len(split.held)


def test_what_was_learned_before_is_learned_again(folder: Path, header: RecordingHeader) -> None:
    index = index_answers([folder], header)
    known = {prompt_hash(answer.prompt_id) for answer in index.answers[:20]}
    split = split_by_prompt(index.answers, known)
    assert not {prompt_hash(answer.prompt_id) for answer in (*split.held, *split.watched)} & known
    assert (len(split.held), len(split.watched)) == (3, 2)
    all_known = {prompt_hash(answer.prompt_id) for answer in index.answers[:31]}
    with pytest.raises(ModelError, match="has 9 new prompts, need 10"):
        split_by_prompt(index.answers, all_known)


def test_a_prompt_under_several_names_is_one(folder: Path, header: RecordingHeader) -> None:
    """A client that gives each request a name of its own asks again what was learned."""
    for number in range(NUM_PROMPTS):
        again = random_conversation(number)
        for turn in (1, 2):
            renamed = replace(again, info=replace(again.info, prompt_id=f"{number}, {turn}"))
            write_conversation(conversation_path(folder, turn * NUM_PROMPTS + number), renamed)
    # Turns of a conversation share a name, and not the tokens before them.
    later = random_conversation(NUM_PROMPTS)
    later = replace(later, info=replace(later.info, prompt_id="0, 2"))
    write_conversation(conversation_path(folder, 3 * NUM_PROMPTS), later)
    answers = index_answers([folder], header).answers
    assert len({answer.prompt for answer in answers}) == NUM_PROMPTS
    named = {prompt_hash(name) for name in ("prompt 0", "0, 1", "0, 2")}
    assert answers[0].prompts == answers[-1].prompts == named
    split = split_by_prompt(answers, ())
    assert len({answer.prompt for answer in split.held}) == 6
    assert len(split.held) in {18, 19}
    # What was learned under one of the names is known under all of them.
    known = {prompt_hash(f"{number}, 1") for number in range(20)}
    split = split_by_prompt(answers, known)
    held = {answer.prompt_id for answer in (*split.held, *split.watched)}
    assert held
    assert not held & {f"prompt {number}" for number in range(20)}


def test_damaged_conversations_are_dropped_and_counted(folder: Path, header: RecordingHeader) -> None:
    features = random_conversation(0).features.copy()
    features[2, 1, 3] = np.nan
    write_conversation(conversation_path(folder, 0), replace(random_conversation(0), features=features))
    conversation_path(folder, 1).write_bytes(b"")
    (folder / ".00000041.feat.aa.part").write_bytes(b"")
    index = index_answers([folder], header)
    assert (len(index.answers), index.num_dropped) == (NUM_PROMPTS - 2, 2)
    assert index.answers[0].prompt_id == "prompt 2"
    assert index.answers[0].tokens.tolist() == random_conversation(2).token_ids[4:].tolist()


def test_recordings_of_nothing_and_of_others_are_refused(
    folder: Path, header: RecordingHeader, tmp_path: Path
) -> None:
    with pytest.raises(
        ModelError, match="records the inputs of layers 1, 3, 5, the drafter reads those of 1, 2, 5"
    ):
        index_answers([folder], replace(header, layers=(1, 2, 5)))
    empty = write_recording(tmp_path / "empty", tmp_path / "target.gguf", [])
    with pytest.raises(ModelError, match=r"empty: no conversation; record some"):
        index_answers([empty], header)
    conversation_path(empty, 0).write_bytes(b"x")
    with pytest.raises(ModelError, match="no conversation that is whole, and 1 that are damaged"):
        index_answers([empty], header)
    assert header.layers == LAYERS


def test_conversations_without_a_prompts_name_are_prompts_of_their_own(
    folder: Path, header: RecordingHeader
) -> None:
    for number in (0, 1):
        conversation = random_conversation(number)
        unnamed = replace(conversation, info=replace(conversation.info, prompt_id=""))
        write_conversation(conversation_path(folder, number), unnamed)
    index = index_answers([folder], header)
    assert len({answer.prompt_id for answer in index.answers}) == NUM_PROMPTS


def test_answers_of_some_keys_are_counted_and_chosen(tmp_path: Path) -> None:
    target = TinyModel("llama").write(tmp_path / "target.gguf")
    header = RecordingHeader(recorded_model(target), LAYERS)
    keys = ["a", "b", "a", "", "c"]
    texts = [random_conversation(number) for number in range(5)]
    texts = [
        replace(text, info=replace(text.info, key_digest=key)) for text, key in zip(texts, keys, strict=True)
    ]
    folder = write_recording(tmp_path / "of", target, texts)
    counts, members = AnswerCounts(folder, header.shape), frozenset("ab")
    found = counts.count(members, -1.0)
    assert (found.num_tokens, len(found.prompts)) == (3 * 20, 3)
    assert found.choice == AnswerChoice(members, 2.0)
    assert counts.count(members, 1.0).num_tokens == 20
    assert counts.count(members, 2.0).num_tokens == 0
    assert counts.count(frozenset("d"), 7.0).choice == AnswerChoice(frozenset(), 7.0)
    # What comes behind a break may have a smaller number.
    conversation_path(folder, 0).unlink()
    later = replace(texts[1], info=replace(texts[1].info, time_s=9.0))
    write_conversation(conversation_path(folder, 0), later)
    conversation_path(folder, 4).write_bytes(b"damaged")
    found = AnswerCounts(folder, header.shape).count(members, 2.0)
    assert (found.num_tokens, found.choice.latest_s) == (20, 9.0)
    for choice, times_s in (
        (AnswerChoice(frozenset("b"), 9.0), [9.0, 1.0]),
        (AnswerChoice(members, 2.0), [1.0, 2.0]),
        (AnswerChoice(frozenset({""}), 9.0), [3.0]),
    ):
        index = index_answers([folder], header, choice)
        assert [answer.info.time_s for answer in index.answers] == times_s
