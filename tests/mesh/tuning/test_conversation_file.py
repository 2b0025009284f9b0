"""Recorded conversations: written and read, and files that are refused."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mesh.tuning.conversation_file import (
    Conversation,
    ConversationInfo,
    FeatureShape,
    conversation_bytes,
    read_conversation,
    read_tokens,
    write_conversation,
)
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPE = FeatureShape(num_layers=3, n_embd=4, n_vocab=100)
INFO = ConversationInfo(
    start=2, answer_start=5, api="chat", temperature=0.7, prompt_id="p1", key_digest="ab", time_s=1e9
)


def conversation(num_tokens: int = 9, num_rows: int = 6) -> Conversation:
    rng = np.random.default_rng(1)
    features = rng.standard_normal((num_rows, 3, 4)).astype(np.float16)
    return Conversation(INFO, rng.integers(0, 100, num_tokens, dtype=np.int32), features)


def with_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a file's header anew, values as they are."""
    data = path.read_bytes()
    (num_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + num_bytes])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + num_bytes :])


def test_a_conversation_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, written = tmp_path / "00000000.feat", conversation()
    write_conversation(path, written)
    read = read_conversation(path, SHAPE)
    assert read.info == written.info
    assert read.num_answer_tokens == 4
    np.testing.assert_array_equal(read.token_ids, written.token_ids)
    np.testing.assert_array_equal(read.features, written.features)
    assert path.stat().st_size == conversation_bytes(written)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    np.testing.assert_array_equal(read_tokens(path, SHAPE).token_ids, written.token_ids)
    assert read_tokens(path, SHAPE).features.shape == (0, 3, 4)


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 40, -1])
def test_a_file_that_ends_early_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "00000000.feat"
    write_conversation(path, conversation())
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=r"00000000\.feat is no recorded conversation: .*; remove it"):
        read_conversation(path, SHAPE)


def test_no_length_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "00000000.feat"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(ModelError, match="header is said to have 9223372036854775808 bytes"):
        read_conversation(path, SHAPE)
    path.write_bytes(struct.pack("<Q", 20_000) + b"[" * 20_000)
    with pytest.raises(ModelError, match="no JSON"):
        read_conversation(path, SHAPE)


def _huge(header: dict[str, Any]) -> None:
    header["features"] = {"dtype": "F16", "shape": [2**40, 3, 4], "data_offsets": [36, 36 + 24 * 2**40]}


def _overlapping(header: dict[str, Any]) -> None:
    header["features"]["data_offsets"] = [0, 144]


def _gap(header: dict[str, Any]) -> None:
    header["features"]["shape"] = [5, 3, 4]
    header["features"]["data_offsets"] = [60, 180]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_huge, "holds 180 bytes of values, need"),
        (_overlapping, "overlap"),
        (_gap, "overlap"),
        (lambda header: header.pop("features"), "does not hold"),
        (lambda header: header.update(more={}), "does not hold"),
        (lambda header: header["features"].update(dtype="F32"), "not of type F16"),
        (lambda header: header["features"].update(shape=[6, -3, -4]), "has shape"),
        (lambda header: header["features"].update(shape=[True, 18, 4]), "has shape"),
        (lambda header: header["features"].update(shape=[6, 3, 5]), "cannot have 144 bytes"),
        (lambda header: header["features"].update(shape=[6, 4, 3]), "4 layers of 3 values"),
        (lambda header: header["features"].update(data_offsets=[36.0, 180]), "has shape"),
        (lambda header: header["__metadata__"].update(start="4"), "do not fit 9 tokens"),
        (lambda header: header["__metadata__"].update(start="-1"), "do not fit 9 tokens"),
        (lambda header: header["__metadata__"].update(answer_start="9"), "answer begins at 9 of 9"),
        (lambda header: header["__metadata__"].update(answer_start="x"), "metadata are not whole"),
        (lambda header: header["__metadata__"].update(api="talk"), "its api is 'talk'"),
        (lambda header: header["__metadata__"].update(time=3), "metadata are no texts"),
        (lambda header: header["__metadata__"].pop("prompt_id"), "metadata are not whole"),
        (lambda header: header["__metadata__"].update(prompt_id="\ud800"), "metadata are not whole"),
        (lambda header: header["__metadata__"].update(time="nan"), "its time is nan"),
    ],
)
def test_a_header_that_does_not_fit_the_file_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    path = tmp_path / "00000000.feat"
    write_conversation(path, conversation())
    with_header(path, change)
    with pytest.raises(ModelError, match=reason):
        read_conversation(path, SHAPE)


def test_values_that_are_no_numbers_and_tokens_of_no_model_are_refused(tmp_path: Path) -> None:
    path, written = tmp_path / "00000000.feat", conversation()
    features = written.features.copy()
    features[3] = np.nan
    write_conversation(path, replace(written, features=features))
    with pytest.raises(ModelError, match="no numbers"):
        read_conversation(path, SHAPE)
    write_conversation(path, replace(written, token_ids=written.token_ids + 100))
    with pytest.raises(ModelError, match="not among the 100"):
        read_tokens(path, SHAPE)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "00000000.feat"
    os.mkfifo(path)
    with pytest.raises(ModelError, match="no regular file"):
        read_conversation(path, SHAPE)
