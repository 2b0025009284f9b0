"""Kinds of scripted models: how each reads functions and results in its prompt, and writes its answers.

Each writes as models of its kind do, which is not always as its template writes the history.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.text.answer_format import CONSTRAIN_MARK
from meshbench.lab.llama_cpp_build import unpacked_source
from spanmesh_proto.errors import MeshError
from tests.qualification.fuzz.altered_models import (
    TEMPLATE,
    text_value,
    with_control_tokens,
    write_vocabulary,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

THOUGHT: Final = "The shell can do that."
"""Reasoning ahead of each answer, of models that reason."""
PREAMBLE: Final = "I copy it."
"""Text ahead of a call."""
# As `mesh.text.chat_template` writes them out for a model whose template knows no tools.
_TOOLS_BEGIN: Final = "<tools>\n"
_TOOLS_END: Final = "\n</tools>\nTo call one"
_RESULT: Final = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_CONTROL_NAME: Final = re.compile(r'<\|[^\s<>|]{1,40}\|>|<\|[a-z_"]{1,40}\|?>|<[a-z_]{1,40}\|>')
# Harmony: functions as types, results in messages of their own.
_HARMONY_FUNCTIONS: Final = re.compile(
    r"\nnamespace functions \{\n(.*?)\n\} // namespace functions", re.DOTALL
)
_HARMONY_FUNCTION: Final = re.compile(
    r"^type (\S+) = \((?:_: \{\n(.*?)^\})?\) => any;$", re.DOTALL | re.MULTILINE
)
_HARMONY_PARAMETER: Final = re.compile(
    r'^(\w+)(\??): (string\[\]|string|number|boolean|any|"[^"\n]*"(?: \| "[^"\n]*")*),(?: //.*)?$',
    re.MULTILINE,
)
_HARMONY_RESULT: Final = re.compile(
    r"<\|start\|>functions\.\S+ to=assistant<\|channel\|>commentary<\|message\|>(.*?)<\|end\|>", re.DOTALL
)
_HARMONY_KINDS: Final = {"string[]": "array", "any": "object"}
# Gemma 4: functions and results between marks, texts between others.
_GEMMA_FUNCTION: Final = re.compile(r"<\|tool>declaration:([^\s{]+)\{(.*?)<tool\|>", re.DOTALL)
_GEMMA_DESCRIPTION: Final = re.compile(r'description:<\|"\|>.*?<\|"\|>,?', re.DOTALL)
_GEMMA_PARAMETER: Final = re.compile(r'(\w+):\{[^{}]*type:<\|"\|>(\w+)<\|"\|>\}')
_GEMMA_REQUIRED: Final = re.compile(r"required:\[([^\]]*)\]")
_GEMMA_TEXT: Final = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_GEMMA_RESULT: Final = re.compile(r"<\|tool_response>response:[^\s{]+\{(.*?)\}<tool_response\|>", re.DOTALL)
_GEMMA_ASKED: Final = "<|turn>model\n"

Functions = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ModelKind:
    """A kind of scripted model."""

    name: str
    """Its name as an option."""
    title: str
    """Its name for people."""
    template: str | None
    """Name of its chat template in llama.cpp's source; None for the demo model's own."""
    offered: Callable[[str], Functions]
    """Returns the functions that a prompt offers: of each its parameters, by its name."""
    results: Callable[[str], list[str]]
    """Returns the results of calls that a prompt has, in order."""
    call: Callable[[str, str, Mapping[str, Any]], str]
    """Makes the answer to a prompt that calls a function of a name with arguments."""
    say: Callable[[str, str], str]
    """Makes the answer to a prompt that is a text."""
    other_marks: tuple[str, ...] = ()
    """Control tokens that it writes and its template does not."""
    reasons: bool = False
    """Whether there is reasoning in each of its answers."""

    def write_model(self, demo: Path, folder: Path) -> Path:
        """The file of such a model: the demo's vocabulary, with this template and its control tokens.

        Args:
            demo: The demo model.
            folder: Folder for the file.

        Raises:
            MeshError: If the template is not there.
        """
        if self.template is None:
            return demo
        source = unpacked_source()
        path = None if source is None else source / "models" / "templates" / f"{self.template}.jinja"
        if path is None or not path.is_file():
            raise MeshError(
                f"the template {self.template} is a part of llama.cpp's source: name its folder in"
                " SPANMESH_LLAMA_CPP, or choose --template note"
            )
        template = path.read_text(encoding="utf-8")
        names = dict.fromkeys([*_CONTROL_NAME.findall(template), *self.other_marks])
        changes = {**with_control_tokens(demo, list(names)), TEMPLATE: text_value(template)}
        return write_vocabulary(demo, folder / f"{self.name}.gguf", changes)


def _noted_functions(prompt: str) -> Functions:
    before, end, _after = prompt.partition(_TOOLS_END)
    if not end:
        return {}
    told = (json.loads(line) for line in before.rpartition(_TOOLS_BEGIN)[2].split("\n"))
    return {function["name"]: function["parameters"] for function in told}


def _noted_call(_prompt: str, name: str, arguments: Mapping[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{PREAMBLE}\n<tool_call>\n{call}\n</tool_call>"


def _harmony_functions(prompt: str) -> Functions:
    told = _HARMONY_FUNCTIONS.search(prompt)
    if told is None:
        return {}
    return {
        name: _schema(
            {
                key: {"enum": json.loads(f"[{kind.replace(' | ', ',')}]")}
                if kind.startswith('"')
                else {"type": _HARMONY_KINDS.get(kind, kind)}
                for key, _, kind in _HARMONY_PARAMETER.findall(parameters)
            },
            [key for key, optional, _ in _HARMONY_PARAMETER.findall(parameters) if not optional],
        )
        for name, parameters in _HARMONY_FUNCTION.findall(told[1])
    }


def _harmony_results(prompt: str) -> list[str]:
    return [str(json.loads(result)) for result in _HARMONY_RESULT.findall(prompt)]


def _harmony_call(_prompt: str, name: str, arguments: Mapping[str, Any]) -> str:
    return (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
        f"<|start|>assistant<|channel|>commentary<|message|>{PREAMBLE}<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
        f"<|message|>{json.dumps(arguments)}<|call|>"
    )


def _harmony_text(_prompt: str, text: str) -> str:
    return (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
        f"<|start|>assistant<|channel|>final<|message|>{text}<|return|>"
    )


def _gemma_functions(prompt: str) -> Functions:
    found = {}
    for name, told in _GEMMA_FUNCTION.findall(prompt):
        parameters = _GEMMA_DESCRIPTION.sub("", told)
        # Those of nested objects come first.
        required = _GEMMA_REQUIRED.findall(parameters)
        found[name] = _schema(
            {key: {"type": kind.lower()} for key, kind in _GEMMA_PARAMETER.findall(parameters)},
            _GEMMA_TEXT.findall(required[-1]) if required else [],
        )
    return found


def _gemma_call(prompt: str, name: str, arguments: Mapping[str, Any]) -> str:
    members = ",".join(f"{key}:{_gemma_value(value)}" for key, value in arguments.items())
    return (
        f"{_gemma_thought(prompt)}{PREAMBLE}<|tool_call>call:{name}{{{members}}}<tool_call|><|tool_response>"
    )


def _gemma_text(prompt: str, text: str) -> str:
    return f"{_gemma_thought(prompt)}{text}<turn|>"


def _gemma_thought(prompt: str) -> str:
    """Reasoning, where the prompt has not ended it already."""
    return f"<|channel>thought\n{THOUGHT}\n<channel|>" if prompt.endswith(_GEMMA_ASKED) else ""


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma_value(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


def _schema(properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    return {"properties": dict(properties), "required": list(required)}


NOTE: Final = ModelKind(
    "note", "the note on tools", None, _noted_functions, _RESULT.findall, _noted_call, lambda _, text: text
)
HARMONY: Final = ModelKind(
    "harmony",
    "Harmony",
    "openai-gpt-oss-120b",
    _harmony_functions,
    _harmony_results,
    _harmony_call,
    _harmony_text,
    (CONSTRAIN_MARK,),
    reasons=True,
)
GEMMA_4: Final = ModelKind(
    "gemma-4",
    "Gemma 4",
    "google-gemma-4-31B-it",
    _gemma_functions,
    _GEMMA_RESULT.findall,
    _gemma_call,
    _gemma_text,
)
MODEL_KINDS: Final = {kind.name: kind for kind in (NOTE, HARMONY, GEMMA_4)}
