"""Command that damages the files of `--kv-disk` at random, and measures what they spare after a restart.

    python -m tests.qualification.kv_disk

First a mesh of two stages in exact mode keeps a prompt on disk. Again and again one of its files is damaged,
the prompt's slot is given to another one, and the prompt is asked again: every damage must be noticed, and
every text must be the one that is computed without any cache. The model is a random one of four layers, since
each damage costs a prompt. Then a chat with the demo's model, or a given one, grows to thousands of tokens;
the first token of a turn is timed with the cache in memory, without any, and after `mesh serve` and all
stages were stopped and started.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import click
import structlog

from mesh.cli.head_client import ask_head
from mesh.cli.shared_options import int_option
from mesh.coordinator.disk_prefixes import BLOCK_POSITIONS
from mesh.serve.options import demo_model
from mesh.status import KvDiskStatus, read_status
from mesh.util.completion_stream import COMPLETION_PATH, stream_completion
from meshbench.experiment import experiment
from meshbench.lab.local_mesh import ServedMesh, served_mesh
from meshbench.report_tools import Line
from meshbench.shared_options import FILE, json_option
from spanmesh_proto.errors import MeshError
from stages.process_limits import processor_name
from tests.qualification.bounded_report import bounded_report
from tests.qualification.random_model import Shape, write_random_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from meshbench.report_tools import Report

_NUM_STAGES: Final = 2
_NUM_BLOCKS: Final = 3
_LIMIT_MIB: Final = 256
_SMALL: Final = Shape(4, 128, 256, 4, 2, 32_000, is_tied=False)
_ANSWER_TOKENS: Final = 16
# Of a turn that adds little: new text, as a share of the prompt.
_NEW_SHARE: Final = 0.04
_FIRST_SHARE: Final = 0.88
_MOST_IN_MEMORY: Final = 0.15
_MOST_FROM_DISK: Final = 0.3
# Ids of plain words in any vocabulary of some size.
_IDS: Final = (1000, 30_000)
_PATIENCE_S: Final = 30.0
_POLL_S: Final = 0.02
_KINDS: Final = ("flip", "flip", "several", "cut", "empty", "grow", "zeros", "other")

log = structlog.get_logger()


@dataclass(frozen=True)
class Answer:
    """One answer."""

    token_ids: tuple[int, ...]
    """Its tokens."""
    ttft_ms: float
    """Time to the first of them."""
    num_cached: int
    """Tokens of the prompt that were not computed."""


@dataclass(frozen=True)
class Damages:
    """What came of the damages."""

    num_made: int
    """Damages."""
    num_noticed: int
    """Files that stages found damaged, and removed."""
    num_same: int
    """Answers with the text that is computed without a cache."""
    num_restored: int
    """Answers that began with positions from disk."""
    most_bytes: int
    """Largest size of all files."""


@dataclass(frozen=True)
class Turn:
    """Times to the first token of one prompt, in milliseconds."""

    num_tokens: int
    """Tokens of the prompt."""
    num_cached: int
    """Those that were not computed."""
    cached_ms: float
    """With the cache."""
    plain_ms: float
    """With `cache_prompt: false`."""

    def line(self, title: str, most_share: float) -> Line:
        """The share with its bound."""
        note = (
            f"{self.cached_ms:.0f} and {self.plain_ms:.0f} ms; {self.num_cached} of {self.num_tokens} tokens "
            "cached"
        )
        return Line(title, self.cached_ms / self.plain_ms, most_share, is_ceiling=True, note=note)


class _Chat:
    """Requests to one mesh.

    Args:
        mesh: The mesh.
        key: Its API key.
    """

    def __init__(self, mesh: ServedMesh, key: str) -> None:
        self._url = f"http://127.0.0.1:{mesh.port}"
        self._key = key

    def ask(self, prompt: Sequence[int], *, num_tokens: int = _ANSWER_TOKENS, caches: bool = True) -> Answer:
        fields: dict[str, Any] = {
            "prompt": [*prompt],
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_prompt": caches,
        }
        started_s = time.monotonic()
        ttft_s: float | None = None
        ids: list[int] = []
        usage: dict[str, Any] = {}
        for chunk in stream_completion(self._url + COMPLETION_PATH, fields, api_key=self._key):
            if chunk.has_tokens and ttft_s is None:
                ttft_s = time.monotonic() - started_s
            ids += chunk.token_ids
            usage = chunk.usage or usage
        if ttft_s is None:
            raise MeshError("an answer has no token")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(tuple(ids), ttft_s * 1000, cached)

    def disk(self) -> KvDiskStatus:
        found = read_status(ask_head(self._url + "/mesh/status", self._key)).kv_disk
        return KvDiskStatus() if found is None else found

    def is_on(self) -> bool:
        return self.disk().on

    def num_damaged(self) -> int:
        return sum(stage.damaged for stage in self.disk().stages if stage is not None)


def _wait_until(is_so: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise MeshError(f"{what} within {_PATIENCE_S:g} s did not come true")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _own_cache(folder: Path) -> Iterator[Path]:
    """Context in which meshes have a cache of their own; the folder of the blocks."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield folder / "spanmesh" / "kv"
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


@contextlib.contextmanager
def _mesh(model: Path, folder: Path, key: str, *options: str) -> Iterator[_Chat]:
    common = ["--stages", str(_NUM_STAGES), "--parallel", "1", "--threads", "1", "--speculate", "off"]
    with served_mesh(model, folder, key, [*common, *options]) as mesh:
        chat = _Chat(mesh, key)
        _wait_until(chat.is_on, "that all stages keep blocks")
        yield chat


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("*/*") if path.suffix in {".rows", ".state"})


def _num_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in _files(root))


def damage(path: Path, other: Path, random: Random) -> str:
    """Change a file at random, so that it is another one.

    Args:
        path: The file.
        other: Another file, whose content it may get.
        random: Source of choices.

    Returns:
        Kind of the change.
    """
    content, kind = bytearray(path.read_bytes()), random.choice(_KINDS)
    at = random.randrange(len(content))
    before = bytes(content)
    match kind:
        case "flip":
            content[at] ^= random.randrange(1, 256)
        case "several":
            for _ in range(8):
                content[random.randrange(len(content))] ^= random.randrange(1, 256)
        case "cut":
            del content[at:]
        case "empty":
            content.clear()
        case "grow":
            content += random.randbytes(1 + at % 5000)
        case "zeros":
            stop = min(len(content), at + random.randrange(1, 5000))
            content[at:stop] = bytes(stop - at)
        case "other":
            content = bytearray(other.read_bytes())
    if content == before:
        content[at] ^= 1
    path.write_bytes(content)
    return kind


def try_damages(folder: Path, num_damages: int, random: Random) -> Damages:
    """Damage files one at a time, and ask again after each.

    Raises:
        MeshError: If the mesh ends or does not mend its files, or if texts do not depend on all blocks.
    """
    model = folder / "random.gguf"
    write_random_gguf(model, _SMALL, "Q8_0", seed=random.randrange(2**32))
    prompt = [random.randrange(*_IDS) for _ in range(_NUM_BLOCKS * BLOCK_POSITIONS + 20)]
    others = [random.randrange(*_IDS) for _ in range(BLOCK_POSITIONS // 2)]
    key = secrets.token_urlsafe(32)
    num_same = num_restored = most_bytes = 0
    with (
        _own_cache(folder) as root,
        _mesh(model, folder, key, "--exact", "--ctx-size", "2048", "--kv-disk", f"{_LIMIT_MIB}M") as chat,
    ):
        expected = chat.ask(prompt, caches=False).token_ids
        # Else rows of another prefix would not be seen in the text.
        for block in range(_NUM_BLOCKS):
            changed = [*prompt]
            changed[block * BLOCK_POSITIONS] += 1
            if chat.ask(changed, caches=False).token_ids == expected:
                raise MeshError(
                    f"the text does not depend on block {block} of the prompt: try another --seed"
                )
        chat.ask(prompt)
        num_files = _NUM_STAGES * _NUM_BLOCKS
        _wait_until(lambda: len(_files(root)) == num_files, f"{num_files} files")
        for number in range(num_damages):
            path, other = random.sample(_files(root), 2)
            kind = damage(path, other, random)
            # In the only slot.
            chat.ask(others, num_tokens=1)
            answer = chat.ask(prompt)
            num_same += answer.token_ids == expected
            num_restored += answer.num_cached > 0
            if answer.token_ids != expected:
                log.error("another_text", number=number, kind=kind, num_cached=answer.num_cached)
            _wait_until(lambda: len(_files(root)) == num_files, "that a damaged file is written again")
            most_bytes = max(most_bytes, _num_bytes(root))
            if number % 100 == 99:
                log.info("damaged", number=number + 1, same=num_same)
        # Counters come with pings.
        with contextlib.suppress(MeshError):
            _wait_until(lambda: chat.num_damaged() >= num_damages, "that all damages are noticed")
        return Damages(num_damages, chat.num_damaged(), num_same, num_restored, most_bytes)


def grow(model: Path, folder: Path, num_tokens: int, random: Random) -> tuple[Turn, Turn]:
    """A chat that grows to so many tokens: a turn shortly before, and the last one, after a restart.

    Raises:
        MeshError: If a mesh does not come up, or ends.
    """
    key = secrets.token_urlsafe(32)
    turn_tokens = max(_ANSWER_TOKENS + 1, int(_NEW_SHARE * num_tokens))
    options = ["--ctx-size", str(num_tokens + 4 * _ANSWER_TOKENS), "--kv-disk", "8G"]

    def more() -> list[int]:
        return [random.randrange(*_IDS) for _ in range(turn_tokens - _ANSWER_TOKENS)]

    with _own_cache(folder) as root:
        with _mesh(model, folder, key, *options) as chat:
            prompt = [random.randrange(*_IDS) for _ in range(int(_FIRST_SHARE * num_tokens))]
            answer = chat.ask(prompt)
            # The turn after the restart is the last that fits.
            while len(prompt) + 2 * turn_tokens <= num_tokens:
                prompt += [*answer.token_ids, *more()]
                answer = chat.ask(prompt)
            log.info("grown", tokens=len(prompt), ttft_ms=round(answer.ttft_ms), cached=answer.num_cached)
            plain = chat.ask(prompt, num_tokens=1, caches=False)
            in_memory = Turn(len(prompt), answer.num_cached, answer.ttft_ms, plain.ttft_ms)
            num_files = _NUM_STAGES * (len(prompt) // BLOCK_POSITIONS)
            _wait_until(lambda: len(_files(root)) >= num_files, "that the chat is on disk")
        prompt += [*answer.token_ids, *more()]
        with _mesh(model, folder, key, *options) as chat:
            answer = chat.ask(prompt, num_tokens=1)
            log.info("restored", tokens=len(prompt), ttft_ms=round(answer.ttft_ms), cached=answer.num_cached)
            plain = chat.ask(prompt, num_tokens=1, caches=False)
            return in_memory, Turn(len(prompt), answer.num_cached, answer.ttft_ms, plain.ttft_ms)


def damage_lines(found: Damages) -> list[Line]:
    """The figures of the damages with their bounds."""
    made = float(found.num_made)
    return [
        Line("damages that were noticed", float(found.num_noticed), made),
        Line("texts as without a cache", float(found.num_same), made),
        Line("answers that began with positions from disk", float(found.num_restored), None),
        Line("largest size of all files, MiB", found.most_bytes / 2**20, _LIMIT_MIB, is_ceiling=True),
    ]


def turn_lines(in_memory: Turn, from_disk: Turn) -> list[Line]:
    """The shares with their bounds."""
    return [
        in_memory.line("first token of a turn over that without a cache", _MOST_IN_MEMORY),
        from_disk.line("the same after a stop and a start", _MOST_FROM_DISK),
    ]


@click.command()
@click.option("--model", type=FILE, help="Of the chat: the demo's model unless given.")
@int_option("--damages", "num_damages", least=0, default=1000, help="Damages; 0 leaves them out.")
@int_option("--tokens", "num_tokens", least=0, default=8000, help="Length of the chat; 0 leaves it out.")
@int_option("--seed", least=0, default=21, help="Of everything that is random.")
@json_option
@experiment
def main(*, model: Path | None, num_damages: int, num_tokens: int, seed: int) -> Report:
    """Damage the files of --kv-disk, and measure what they spare after a restart.

    Prints each criterion, and exits with 1 if one is missed.
    """
    model, random = model or demo_model(), Random(seed)
    lines: list[Line] = []
    # Blocks of the one must not count for the other.
    with (
        tempfile.TemporaryDirectory(prefix="mesh-kv-disk-") as for_damages,
        tempfile.TemporaryDirectory(prefix="mesh-kv-disk-") as for_chat,
    ):
        if num_damages:
            lines += damage_lines(try_damages(Path(for_damages), num_damages, random))
        if num_tokens:
            lines += turn_lines(*grow(model, Path(for_chat), num_tokens, random))
    conditions = {
        "damages_with": "a random model of four layers" if num_damages else "none",
        "chat_with": model.name if num_tokens else "none",
        "stages": _NUM_STAGES,
        "processor": processor_name(),
        "seed": seed,
    }
    return bounded_report("Files of --kv-disk", conditions, lines)


if __name__ == "__main__":
    main()
