"""Answers and what they mean, out of the chat tests of llama.cpp's source, as JSON lines.

    python -m tests.qualification.chat_cases …/tests/test-chat.cpp > tests/data/chat_cases.jsonl

Texts and meanings are facts; the lines have no code. What the script cannot read is left out and counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
    |R"(?P<delimiter>[^(\s]*)\((?P<raw>.*?)\)(?P=delimiter)"
    |"(?P<text>(?:[^"\\]|\\.)*)"
    |(?P<word>[A-Za-z_][\w:]*)
    |(?P<number>\d+)
    |(?P<sign>.)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", '"': '"', "'": "'", "\\": "\\"}
_TESTER: Final = re.compile(
    r'auto (\w+) = peg_tester\((?:"models/templates/([^"]+)\.jinja"|(\w+))'
    r"|static void test_lfm2_parser\(|for \(const auto & path :\s*\{([^}]*)\}|(\w+)\.test\("
)
_STRING: Final = re.compile(
    r"(?:std::string|const char \*|auto|std::vector<common_chat_tool_call>|common_chat_tool_call)\s+(\w+)\s*="
)
_TOOL: Final = re.compile(r"static common_chat_tool (\w+)\s*\{")
_TOOLS: Final = re.compile(r"std::vector<common_chat_tool> tools\{([^}]*)\}")
_MESSAGE: Final = re.compile(r"(?:const )?common_chat_msg (\w+)\s*=")
_LFM2: Final = re.compile(r"for \(const char \* tmpl : \{([^}]*)\}\) \{\s*test_lfm2_parser")
_PATH: Final = re.compile(r'models/templates/([^"]+)\.jinja')


class _Reader:
    """Reads expressions of C++ as far as these tests have them."""

    def __init__(self, source: str, at: int, known: dict[str, Any]) -> None:
        self._tokens = _tokens(source, at)
        self._known = known
        self._next: tuple[str, str] = ("", "")
        self.take()

    def take(self) -> tuple[str, str]:
        taken = self._next
        self._next = next(self._tokens, ("", ""))
        return taken

    @property
    def sign(self) -> str:
        """The next sign; empty if something else comes next."""
        kind, text = self._next
        return text if kind == "sign" else ""

    def expression(self) -> Any:
        value = self._term()
        while self.sign == "+":
            self.take()
            value += self._term()
        return value

    def items(self, end: str) -> list[Any]:
        """Expressions up to a sign, behind the one that begins them."""
        found = []
        while self.sign != end:
            found.append(self.expression())
            if self.sign == ",":
                self.take()
        self.take()
        return found

    def _term(self) -> Any:
        kind, text = self.take()
        if kind == "text":
            while self._next[0] == "text":
                text += self.take()[1]
            return text
        if kind == "number":
            return int(text)
        if text == "{":
            return self.items("}")
        if kind != "word":
            raise ValueError(f"{text!r} is no expression")
        if self.sign == "(":
            self.take()
            return _made(text, self.items(")"))
        if self.sign == "{":
            self.take()
            return self.items("}")
        if text in {"true", "false"}:
            return text == "true"
        return text if text.startswith("COMMON_") else self._known[text]


def _tokens(source: str, at: int) -> Iterator[tuple[str, str]]:
    while (found := _TOKEN.match(source, at)) is not None:
        at = found.end()
        if found["raw"] is not None:
            yield "text", found["raw"]
        elif found["text"] is not None:
            yield "text", _unescaped(found["text"])
        elif found["space"] is None:
            kind = cast("str", found.lastgroup)
            yield kind, found[kind]


def _unescaped(text: str) -> str:
    data = re.sub(
        r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)",
        lambda found: (
            f"\x00{found[1][1:]}\x00"
            if found[1][0] == "x" and len(found[1]) == 3
            else chr(int(found[1][1:], 16))
            if len(found[1]) == 5
            else _ESCAPES[found[1]]
        ),
        text,
    )
    # Bytes by number are those of UTF-8.
    return re.sub(
        r"(?:\x00[0-9a-fA-F]{2}\x00)+",
        lambda found: bytes.fromhex(found[0].replace("\x00", "")).decode(),
        data,
    )


def _message(
    content: str = "", reasoning: str = "", name: str = "", arguments: str = "", _id: str = ""
) -> dict[str, Any]:
    return {"content": content, "reasoning": reasoning, "calls": [[name, arguments]] if name else []}


def _made(function: str, values: list[Any]) -> Any:
    match function:
        case "simple_assist_msg":
            return _message(*values)
        case "message_with_tool_calls":
            return _message("", "", *values)
        case "message_with_tool_calls_and_reasoning":
            return _message("", values[2], *values[:2])
        case "message_with_content_and_tool_call":
            return _message(values[0], "", *values[1:])
        case "message_with_reasoning_and_tool_call":
            return _message("", values[0], *values[1:])
        case "message_with_reasoning_content_and_multiple_tool_calls":
            return {"content": values[1], "reasoning": values[0], "calls": values[2]}
        case "std::string":
            return values[0]
    raise ValueError(f"{function} is not known")


def _cases(source: str) -> Iterator[dict[str, Any] | str]:
    """Cases, and reasons why others could not be read."""
    known: dict[str, Any] = {}
    for pattern in (_TOOL, _MESSAGE, _STRING):
        for found in pattern.finditer(source):
            try:
                at = found.end() - 1 if pattern is _TOOL else found.end()
                known[found[1]] = _Reader(source, at, known).expression()
            except (ValueError, KeyError, TypeError):
                continue
    listed = _TOOLS.search(source)
    known["tools"] = [known[name] for name in re.findall(r"\w+", "" if listed is None else listed[1])]
    for name in ("message_user", "message_user_parts", *re.findall(r"common_chat_msg (\w+);", source)):
        known[name] = {}
    templates: list[str] = []
    paths: list[str] = []
    for found in _TESTER.finditer(source):
        if source[: found.start()].rpartition("\n")[2].lstrip().startswith("//"):
            continue
        if found[0].startswith("static void"):
            paths = [path for each in _LFM2.findall(source) for path in _PATH.findall(each)]
        elif found[4] is not None:
            paths = _PATH.findall(found[4])
        elif found[1] is not None:
            templates = paths if found[2] is None else [found[2]]
        else:
            # A text that is defined before it counts, not one of the same name elsewhere.
            for text in _STRING.finditer(source, 0, found.start()):
                try:
                    known[text[1]] = _Reader(source, text.end(), known).expression()
                except (ValueError, KeyError, TypeError):
                    continue
            try:
                case = _case(source, found.end(), known)
            except (ValueError, KeyError, TypeError) as error:
                yield f"line {source.count(chr(10), 0, found.start()) + 1}: {error!r}"
                continue
            for template in templates:
                yield {"template": template, **case}


def _case(source: str, at: int, known: dict[str, Any]) -> dict[str, Any]:
    reader = _Reader(source, at, known)
    (text,) = reader.items(")")
    given: dict[str, list[Any]] = {}
    while reader.sign == ".":
        reader.take()
        name = reader.take()[1]
        if reader.take()[1] != "(":
            raise ValueError(f"{name} is no call")
        given[name] = reader.items(")")
    (said,) = given.get("expect", [_message()])
    messages = given.get("messages", [[]])[0]
    prefill = messages[-1] if "continue_final_message" in given and messages else None
    return {
        "text": text,
        "tools": {tool[0]: _json(tool[2] if len(tool) > 2 else "") for tool in given.get("tools", [[]])[0]},
        "thinks": given.get("enable_thinking", [True])[0],
        "splits": given.get("reasoning_format", ["COMMON_REASONING_FORMAT_NONE"])[0]
        != "COMMON_REASONING_FORMAT_NONE",
        "is_cut": given.get("is_partial", [False])[0],
        "has_schema": "json_schema" in given,
        "is_forced": given.get("tool_choice", [""])[0] == "COMMON_CHAT_TOOL_CHOICE_REQUIRED",
        "prefill": None if prefill is None else [prefill["content"], prefill["reasoning"]],
        "content": given.get("expect_content", [said["content"]])[0],
        "reasoning": given.get("expect_reasoning", [said["reasoning"]])[0],
        "calls": [[call[0], call[1]] for call in given.get("expect_tool_calls", [said["calls"]])[0]],
    }


def _json(text: str) -> Any:
    return json.loads(text) if text.strip() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="tests/test-chat.cpp of llama.cpp")
    unread = []
    for case in _cases(parser.parse_args().source.read_text()):
        if isinstance(case, str):
            unread.append(case)
        else:
            print(json.dumps(case, ensure_ascii=False))
    print(f"{len(unread)} could not be read", *unread, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
