"""What others rely on and no test of behaviour compares as a whole: each contract as a document of JSON.

A change of structure leaves them as they are. A wanted change is recorded by `python -m
tests.contracts.record`, which prints what became different; the commit says why.
"""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import click
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.json_format import MessageToDict

from mesh.cli.main import command_named, configurable_commands, every_command, run
from spanmesh_proto import embedding_pb2, links_pb2, membership_pb2, pictures_pb2, windows_pb2
from spanmesh_proto.errors import WIRE

RECORDED = Path(__file__).parent / "recorded"
ROOT = Path(__file__).parents[2]
_LOGGED = {"debug", "info", "warning", "error", "exception", "critical"}
_HELP_COLUMNS = "102"


def wire() -> dict[str, Any]:
    """Messages and services of the protocol."""
    found = {}
    for module in (windows_pb2, membership_pb2, links_pb2, embedding_pb2, pictures_pb2):
        file = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        found[file.name] = MessageToDict(file)
    return found


def errors() -> dict[str, Any]:
    """Codes, gRPC statuses, HTTP statuses and types of all errors."""
    return {kind.__name__: list(vars(wired).values()) for kind, wired in WIRE.items()}


def commands() -> dict[str, list[str]]:
    """What `--help` says, of every command."""
    return {words: _output(f"{words} --help")[1] for words in ("", *_words_of_commands())}


def _words_of_commands() -> Iterator[str]:
    for name in every_command():
        yield name
        command = command_named(name)
        if isinstance(command, click.Group):
            yield from (f"{name} {inner}" for inner in command.list_commands(click.Context(command)))


def configuration() -> dict[str, list[str]]:
    """Keys and defaults of every command that a file or the environment sets."""
    return {name: _output(f"config show {name}")[1] for name in configurable_commands()}


def refusals() -> dict[str, Any]:
    """Exit codes and messages of wrong calls."""
    return {
        call: list(_output(call)) for call in (RECORDED.parent / "wrong_calls.txt").read_text().splitlines()
    }


def events() -> list[str]:
    """Names of all events in the log."""
    names: set[str] = set()
    for room in ("mesh", "meshbench", "stages", "speculative", "proto"):
        for path in (ROOT / room).rglob("*.py"):
            names.update(_events_in(ast.parse(path.read_bytes())))
    return sorted(names)


def _events_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=level), args=[ast.Constant(value=str(name)), *_]):
                if level in _LOGGED and re.fullmatch(r"[a-z][a-z_0-9]+", name):
                    yield name


DOCUMENTS: Mapping[str, Callable[[], Any]] = {
    each.__name__: each for each in (wire, errors, commands, configuration, refusals, events)
}


def recorded(name: str) -> Any:
    """A document as it was recorded; None if it was not."""
    path = RECORDED / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    """A line for each place at which two documents differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            place = f"{at}.{key}" if at else str(key)
            if key not in new:
                yield f"- {place}: {json.dumps(old[key], ensure_ascii=False)}"
            elif key not in old:
                yield f"+ {place}: {json.dumps(new[key], ensure_ascii=False)}"
            else:
                yield from differences(old[key], new[key], place)
    elif isinstance(old, list) and isinstance(new, list):
        yield from _of_lists(old, new, at)
    elif old != new or type(old) is not type(new):
        yield f"~ {at}: {json.dumps(old, ensure_ascii=False)} -> {json.dumps(new, ensure_ascii=False)}"


def _of_lists(old: list[Any], new: list[Any], at: str) -> Iterator[str]:
    if len(old) == len(new) and not all(isinstance(each, str) for each in (*old, *new)):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{at}[{index}]")
        return
    # Lines and names: those that came and went.
    yield from (f"- {at}: {json.dumps(each, ensure_ascii=False)}" for each in old if each not in new)
    yield from (f"+ {at}: {json.dumps(each, ensure_ascii=False)}" for each in new if each not in old)
    if old != new and set(map(str, old)) == set(map(str, new)):
        yield f"~ {at}: in another order, or repeated"


def _output(call: str) -> tuple[int, list[str]]:
    """Exit code and lines of a command, in an empty folder of an empty home."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        plain = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
        home = {"HOME": folder, "XDG_CONFIG_HOME": folder, "XDG_CACHE_HOME": folder, "COLUMNS": _HELP_COLUMNS}
        Path("no_model.gguf").write_bytes(b"no model")
        Path("wrong.toml").write_text("[serve]\nprot = 1\n")
        out = io.StringIO()
        with (
            mock.patch.dict(os.environ, plain | home, clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            code = run(shlex.split(call))
        return code, [line.rstrip().replace(folder, "FOLDER") for line in out.getvalue().splitlines()]
