"""`mesh chat`: a chat in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import click

from mesh.commands.head_options import head_options, key_of

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.commands.chat_session import ChatSession


@click.command()
@head_options
@click.option("--model", default="default", show_default=True, help="Which of the served models.")
@click.option("--system", metavar="TEXT", help="What the model is told before the chat.")
@click.option("--temperature", type=click.FloatRange(0.0, 2.0), help="The server's own unless given.")
@click.option(
    "--max-tokens", metavar="N", type=click.IntRange(1), help="Of each answer; what fits unless given."
)
@click.option("--seed", metavar="N", type=click.IntRange(0), help="Makes the same chat come out again.")
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
    from mesh.commands.chat_session import ChatSession  # noqa: PLC0415 - keeps --help quick

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
        # Arrow keys, and what was typed before. Not everywhere.
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
            # At the prompt there is nothing to stop but the line itself.
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
