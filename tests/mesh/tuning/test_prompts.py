"""Prompts of a file: their forms, and lines that are refused by their number."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mesh.tuning.prompts import OwnPrompts, Prompt, read_prompts
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, *lines: Any, is_raw: bool = False) -> list[Prompt]:
    path = folder / "prompts.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts))
    found = read_prompts(str(path), path, is_raw=is_raw)
    assert isinstance(found, list)
    return found


def test_three_forms_of_lines(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be kind."}
    found = read(
        tmp_path,
        {"prompt": "What is a tree?", "id": 7},
        "",
        {"messages": [system, {"role": "user", "content": "Hello"}]},
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Write again."]},
        {"prompt": "What is a tree?"},
    )
    assert [prompt.turns for prompt in found] == [
        ("What is a tree?",),
        ("Hello",),
        ("Write.", "Write again."),
        ("What is a tree?",),
    ]
    assert [prompt.messages for prompt in found] == [(), (system,), (), ()]
    # The same prompt has one name, and is held out together.
    assert found[0] == found[3]
    assert len({prompt.name for prompt in found}) == 3


def test_raw_prompts_are_texts(tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"prompt": "1, 2,"}, is_raw=True)
    assert (found.turns, found.messages) == (("1, 2,",), ())
    for chat in ({"turns": ["a", "b"]}, {"messages": [{"role": "system", "content": "a"}, _user("b")]}):
        with pytest.raises(ModelError, match=r"line 2 of .* is a chat"):
            read(tmp_path, {"prompt": "1"}, chat, is_raw=True)


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[" * 10_000,
        [],
        {},
        {"prompt": ""},
        {"prompt": 7},
        {"prompt": "\ud800"},
        {"turns": []},
        {"turns": ["a", ""]},
        {"turns": ["a"] * 65},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": ["a", _user("b")]},
        {"messages": [_user([{"type": "text", "text": "b"}])]},
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: Any) -> None:
    with pytest.raises(ModelError, match=r"line 2 of .*prompts.jsonl is no (JSON|prompt): write"):
        read(tmp_path, {"prompt": "a"}, line)


def test_files_without_prompts_and_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no prompt"):
        read(tmp_path, "", "  ")
    with pytest.raises(ModelError, match=r"No such file .* or own:N"):
        read_prompts("nothing.jsonl", tmp_path / "nothing.jsonl", is_raw=False)
    with pytest.raises(ModelError, match=r"line 1 of .* bytes: shorten it"):
        read(tmp_path, '{"prompt": "' + "a" * (5 << 20) + '"}')


def test_own_prompts(tmp_path: Path) -> None:
    assert read_prompts("own:40", tmp_path, is_raw=False) == OwnPrompts(40)
    for words, is_raw in (("own:0", False), ("own:4", True)):
        with pytest.raises(ModelError, match="leave out --raw, or name a file"):
            read_prompts(words, tmp_path, is_raw=is_raw)
