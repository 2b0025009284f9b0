"""`mesh chat` and its session."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click

from mesh.cli.shared_options import head_options, key_of
from mesh.util.completion_stream import CHAT_PATH, Chunk, stream_completion
from mesh.util.printable import printable
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_HELP: Final = """\
/clear          begin a new chat
/retry          generate the last answer again
/system TEXT    set the system prompt; without TEXT, remove it
/set NAME VALUE a field of the request, such as temperature 0.7; without VALUE the server's own again
/show           what was said so far
/stats          what the last answer took
/quit           end the chat
Ctrl-C stops an answer; what was written of it stays.
"""


class ChatSession:
    """A chat, in memory only.

    Args:
        url: URL of the API, without a path.
        key: API key, if the server needs one.
        model: Model name.
        system: System message, or None.
        fields: Further fields of each request.
        write: Prints text at once; gets no control characters, which a model may write.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        *,
        model: str,
        system: str | None,
        fields: dict[str, Any],
        write: Callable[[str], None],
    ) -> None:
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018 - raises ValueError if it is not a port
        except ValueError as error:
            raise click.BadParameter(f"{url!r} is not an address: {error}", param_hint="--url") from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise click.BadParameter(f"{url!r} does not start with http:// or https://", param_hint="--url")
        self._url = url
        self._key = key
        self._model = model
        self._system = system
        self._fields = fields
        self._write: Callable[[str], None] = lambda text: write(printable(text))
        self._messages: list[dict[str, str]] = []
        self._stats = "there is no answer yet"

    def take(self, line: str) -> bool:
        """Handle a line of the user.

        Returns:
            Whether the chat continues.
        """
        text = line.strip()
        if text.startswith("/"):
            return self._command(*text[1:].partition(" ")[::2])
        if text:
            self._messages.append({"role": "user", "content": text})
            self._answer()
        return True

    def _command(self, name: str, rest: str) -> bool:
        rest = rest.strip()
        match name:
            case "quit" | "exit":
                return False
            case "help":
                self._write(_HELP)
            case "clear":
                self._messages.clear()
                self._write("(new chat)\n")
            case "system":
                self._system = rest or None
            case "set":
                self._set(*rest.partition(" ")[::2])
            case "show":
                for message in self._messages:
                    self._write(f"{message['role']}: {message['content']}\n")
            case "stats":
                self._write(self._stats + "\n")
            case "retry":
                self._retry()
            case _:
                self._write(f"unknown command /{name}; /help lists all\n")
        return True

    def _set(self, name: str, value: str) -> None:
        if not name:
            self._write(f"{json.dumps(self._fields)}\n")
        elif not value.strip():
            self._fields.pop(name, None)
        else:
            try:
                self._fields[name] = json.loads(value)
            except ValueError:
                self._fields[name] = value.strip()

    def _retry(self) -> None:
        before = self._messages.copy()
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if not self._messages:
            self._write("there is no question yet\n")
            return
        self._answer()
        if len(self._messages) < len(before):
            # Without a new answer the former one remains.
            self._messages = before

    def _answer(self) -> None:
        """Stream one answer. Received text is kept; a failed question is not."""
        pieces: list[str] = []
        start_s, first_s = time.perf_counter(), None
        last = Chunk()
        try:
            for chunk in self._stream():
                last = chunk if chunk.usage else last
                if chunk.text:
                    first_s = first_s or time.perf_counter()
                    pieces.append(chunk.text)
                    self._write(chunk.text)
            self._write("\n")
        except KeyboardInterrupt:
            self._write("\n(stopped)\n")
        except MeshError as error:
            self._write(f"{chr(10) if pieces else ''}error: {error.message}\n")
        if pieces:
            self._messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self._messages.pop()
        self._note(start_s, first_s, last)

    def _note(self, start_s: float, first_s: float | None, last: Chunk) -> None:
        if first_s is None:
            return
        end_s = time.perf_counter()
        usage, timings = last.usage, last.timings
        num_tokens = usage.get("completion_tokens", 0)
        rate = f", {(num_tokens - 1) / (end_s - first_s):.1f} tokens/s" if num_tokens > 1 else ""
        # llama-server's names.
        num_proposed, num_accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        proposed = f", {num_accepted} of {num_proposed} proposed accepted" if num_proposed else ""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self._stats = (
            f"first token after {first_s - start_s:.2f} s{rate}; {usage.get('prompt_tokens', '?')} prompt "
            f"tokens, {cached} of them cached; {num_tokens or '?'} written{proposed}"
        )

    def _stream(self) -> Iterator[Chunk]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {"model": self._model, "messages": [*system, *self._messages], **self._fields}
        return stream_completion(self._url + CHAT_PATH, body, api_key=self._key)


@click.command()
@head_options
@click.option("--model", default="default", show_default=True, help="Name of the model.")
@click.option("--system", metavar="TEXT", help="System prompt of the chat.")
@click.option("--temperature", type=click.FloatRange(0.0, 2.0), help="The server's default unless given.")
@click.option(
    "--max-tokens",
    metavar="N",
    type=click.IntRange(1),
    help="Maximum of tokens per answer; what fits in the context unless given.",
)
@click.option(
    "--seed", metavar="N", type=click.IntRange(0), help="Seed of sampling, for a reproducible chat."
)
def chat(
    *,
    url: str,
    api_key_file: Path | None,
    model: str,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
) -> None:
    """Chat with a running mesh, or any OpenAI server.

    Ctrl-C stops an answer, Ctrl-D or /quit ends the chat; /help lists what else there is. The chat is kept in
    memory only. Without a terminal each line of standard input is one turn.
    """
    fields = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    session = ChatSession(
        url.rstrip("/"),
        key_of(api_key_file),
        model=model,
        system=system,
        fields={name: value for name, value in fields.items() if value is not None},
        write=_write,
    )
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        # Arrow keys and history, where readline is available.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415 - importing it is what it takes
        _write(f"chatting with {model} at {url}; /help lists commands\n")
    _talk(session, is_terminal=is_terminal)


def _talk(session: ChatSession, *, is_terminal: bool) -> None:
    while True:
        try:
            line = input("> ") if is_terminal else _next_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            # At the prompt there is no answer to stop.
            _write("\n(Ctrl-D or /quit ends the chat)\n")
            continue
        if not session.take(line):
            return


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
