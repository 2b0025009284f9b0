"""Offline evaluation of the n-gram proposer on recorded texts.

A file of one release of a package is the prompt, the same file in a later release is what a model would
answer: a full rewrite with the changes that its authors made. The text is tokenised as the served model would
and replayed window by window. The releases are fetched by pip, or two folders are given.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.serve.options import demo_model
from mesh.text.tokenizer import Tokenizer
from mesh.util.child_environment import module_command
from mesh.util.logs import set_up_logs
from mesh.util.printable import say
from spanmesh_proto.errors import MeshError
from speculative.acceptance import judge
from speculative.lookup_proposers import NgramOptions, NgramProposer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from speculative.proposer import Proposer

# Copies of other projects' code change all at once, if they do.
_VENDORED: Final = frozenset({"_vendor", "vendored"})
# Longer files do not fit a session together with their rewrite.
MAX_FILE_TOKENS: Final = 8192
MIN_FILE_TOKENS: Final = 64
DEFAULT_WIDTHS: Final = (8, 16, 32, 64)
TokenEdit = tuple[list[int], list[int]]
_FOLDER: Final = click.Path(exists=True, file_okay=False, path_type=Path)


@dataclass(frozen=True)
class Release:
    """A package at a version, such as `flask` at `3.0.3`."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class ReleasePair:
    """Two releases of one package."""

    package: str
    old: str
    new: str

    @property
    def releases(self) -> tuple[Release, Release]:
        """The older one, then the newer."""
        return Release(self.package, self.old), Release(self.package, self.new)


# None of these had a part in fitting the proposer (`speculative.ngram_search`).
PAIRS: Final = (
    ReleasePair("click", "8.1.8", "8.2.1"),
    ReleasePair("flask", "3.0.3", "3.1.1"),
    ReleasePair("httpx", "0.27.2", "0.28.1"),
    ReleasePair("jinja2", "3.1.2", "3.1.6"),
    ReleasePair("requests", "2.31.0", "2.32.3"),
    ReleasePair("rich", "13.9.4", "14.0.0"),
    ReleasePair("starlette", "0.41.3", "0.46.0"),
    ReleasePair("urllib3", "2.2.3", "2.4.0"),
    ReleasePair("werkzeug", "3.0.6", "3.1.3"),
)


@dataclass(frozen=True)
class FileEdit:
    """A file before and after."""

    path: str
    """Inside the package."""
    before: str
    """Its text in the older release."""
    after: str
    """Its text in the newer one."""


@dataclass
class ReplayTotals:
    """Sums over replays."""

    num_texts: int = 0
    """Texts replayed."""
    num_tokens: int = 0
    """Their tokens."""
    num_steps: int = 0
    """Windows, one behind the other."""
    num_proposed: int = 0
    """Proposed tokens."""
    num_accepted: int = 0
    """Those that the text has, too."""
    num_prompt_tokens: int = 0
    """Tokens of the prompts."""
    prompt_us: float = 0.0
    """Time that the proposer took for them."""
    propose_us: list[float] = field(default_factory=list)
    """Of each call, microseconds."""
    extend_us: list[float] = field(default_factory=list)
    """Of each call with committed tokens, microseconds."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step brings; 0 without steps."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance(self) -> float:
        """Share of proposed tokens that were right; 0 without any."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def prompt_us_per_token(self) -> float:
        """Time per prompt token; 0 without any."""
        return self.prompt_us / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def edits_between(old: Mapping[str, str], new: Mapping[str, str]) -> list[FileEdit]:
    """The files that both have and that differ, by path."""
    return [
        FileEdit(path, old[path], new[path])
        for path in sorted(old.keys() & new.keys())
        if old[path] != new[path]
    ]


def download(pairs: Sequence[ReleasePair], folder: Path) -> Iterator[FileEdit]:
    """The edits between releases, which pip fetches from the index that it is configured for.

    Args:
        pairs: Which releases.
        folder: Where the wheels go; those that are there already are not fetched again.

    Raises:
        MeshError: If pip cannot fetch one.
    """
    for pair in pairs:
        old, new = (read_wheel(_fetch(release, folder)) for release in pair.releases)
        yield from edits_between(old, new)


def read_wheel(path: Path) -> dict[str, str]:
    """The Python files in a wheel, by path."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if _is_wanted(PurePosixPath(name))]
        return {name: wheel.read(name).decode("utf-8", "replace") for name in names}


def read_folder(folder: Path) -> dict[str, str]:
    """The Python files in a folder, by path inside it.

    Raises:
        MeshError: If it is no folder.
    """
    if not folder.is_dir():
        raise MeshError(f"{folder} is not a folder: give one that holds a release")
    paths = (path for path in folder.rglob("*.py") if _is_wanted(PurePosixPath(path.relative_to(folder))))
    return {str(path.relative_to(folder)): path.read_text("utf-8", "replace") for path in paths}


def _is_wanted(path: PurePosixPath) -> bool:
    return path.suffix == ".py" and not _VENDORED.intersection(path.parts)


def _fetch(release: Release, folder: Path) -> Path:
    target = folder / str(release)
    wheel = next(target.glob("*.whl"), None)
    if wheel is None:
        pip = module_command("pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
        command = [*pip, "--dest", str(target), str(release)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        wheel = next(target.glob("*.whl"), None)
        if done.returncode or wheel is None:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            raise MeshError(f"pip cannot download {release}: {lines[-1]}")
    return wheel


def replay(
    proposer: Proposer,
    prompt: Sequence[int],
    target: Sequence[int],
    totals: ReplayTotals,
    *,
    max_width: int,
    clock_ns: Callable[[], int],
) -> None:
    """Let a proposer guess a text, in step: each window is judged before the next is proposed.

    Args:
        proposer: New.
        prompt: Token ids that go before.
        target: Token ids that a model would choose.
        totals: Added to.
        max_width: Maximum of proposed tokens in a window.
        clock_ns: Monotonic.
    """
    begun_ns = clock_ns()
    proposer.extend(prompt)
    totals.prompt_us += (clock_ns() - begun_ns) / 1000
    totals.num_texts += 1
    totals.num_tokens += len(target)
    totals.num_prompt_tokens += len(prompt)
    place = 0
    while place < len(target):
        begun_ns = clock_ns()
        proposal = proposer.propose(max_width)
        totals.propose_us.append((clock_ns() - begun_ns) / 1000)
        # The last row of a window gives one token more than were proposed.
        proposed = proposal.tokens[: len(target) - place - 1]
        judgement = judge(proposed, verdict_on(proposed, target[place : place + len(proposed) + 1]))
        begun_ns = clock_ns()
        proposer.extend(judgement.committed)
        totals.extend_us.append((clock_ns() - begun_ns) / 1000)
        totals.num_steps += 1
        totals.num_proposed += judgement.num_proposed
        totals.num_accepted += judgement.num_accepted
        place += len(judgement.committed)


def verdict_on(proposed: Sequence[int], target: Sequence[int]) -> Sequence[int]:
    """Verdict of a tail whose model samples `target`: up to the first token that was not proposed."""
    pairs = zip(proposed, target, strict=False)
    wrong = next((row for row, (guess, token) in enumerate(pairs) if guess != token), len(proposed))
    return target[: wrong + 1]


def median_and_p99(values: Sequence[float]) -> tuple[float, float]:
    """Of at least two values."""
    cuts = quantiles(values, n=100)
    return cuts[49], cuts[98]


def tokenize(edits: Iterable[FileEdit], encode: Callable[[str], list[int]]) -> list[TokenEdit]:
    """Both sides of each edit as token ids, files of no usual size left out."""
    pairs = ((encode(edit.before), encode(edit.after)) for edit in edits)
    sizes = range(MIN_FILE_TOKENS, MAX_FILE_TOKENS + 1)
    return [(before, after) for before, after in pairs if len(before) in sizes and len(after) in sizes]


def measure(edits: Sequence[TokenEdit], max_width: int, options: NgramOptions) -> ReplayTotals:
    """Replay all edits, each with a proposer of its own."""
    totals = ReplayTotals()
    for before, after in edits:
        proposer = NgramProposer(options)
        replay(proposer, before, after, totals, max_width=max_width, clock_ns=time.perf_counter_ns)
    return totals


def figures(totals: ReplayTotals, max_width: int) -> dict[str, Any]:
    """For a JSON file."""
    propose_us, propose_p99_us = median_and_p99(totals.propose_us)
    extend_us, extend_p99_us = median_and_p99(totals.extend_us)
    return {
        "max_width": max_width,
        "edits": totals.num_texts,
        "tokens": totals.num_tokens,
        "steps": totals.num_steps,
        "tokens_per_step": round(totals.tokens_per_step, 3),
        "acceptance": round(totals.acceptance, 4),
        "propose_us": round(propose_us, 2),
        "propose_p99_us": round(propose_p99_us, 2),
        "extend_us": round(extend_us, 2),
        "extend_p99_us": round(extend_p99_us, 2),
        "prompt_us_per_token": round(totals.prompt_us_per_token, 3),
    }


def as_line(row: dict[str, Any]) -> str:
    """For people."""
    return (
        f"width {row['max_width']:>3}: {row['tokens_per_step']:5.2f} tokens per step,"
        f" {row['acceptance']:.3f} accepted;"
        f" propose {row['propose_us']:.1f} µs (p99 {row['propose_p99_us']:.1f}),"
        f" extend {row['extend_us']:.1f} µs (p99 {row['extend_p99_us']:.1f}),"
        f" prompt {row['prompt_us_per_token']:.2f} µs per token"
    )


def _widths(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    widths = tuple(int(word) if word.isdecimal() else 0 for word in value.split(","))
    if min(widths) < 1:
        raise click.BadParameter(f"{value!r} is not a list of positive numbers such as 16,32")
    return widths


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="GGUF file with the tokenizer; the demo's model unless given.",
)
@click.option(
    "--releases",
    nargs=2,
    type=_FOLDER,
    multiple=True,
    metavar="OLD NEW",
    help="Folders with releases of a package.",
)
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Folder for downloads.")
@click.option(
    "--widths",
    default=",".join(map(str, DEFAULT_WIDTHS)),
    show_default=True,
    callback=_widths,
    help="Maximum of proposed tokens in a window.",
)
@click.option(
    "--tokens-per-evidence",
    default=NgramOptions().tokens_per_evidence,
    show_default=True,
    help="Its boldness.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write figures.")
def main(
    *,
    model: Path | None,
    releases: tuple[tuple[Path, Path], ...],
    keep: Path | None,
    widths: tuple[int, ...],
    tokens_per_evidence: float,
    json_path: Path | None,
) -> None:
    """Replay recorded file edits through the n-gram proposer."""
    set_up_logs()
    try:
        options = NgramOptions(tokens_per_evidence=tokens_per_evidence)
        tokenizer = Tokenizer(model or demo_model())
        with tempfile.TemporaryDirectory(prefix="mesh-bench-") as scratch:
            edits = tokenize(
                [edit for pair in releases for edit in edits_between(*map(read_folder, pair))]
                if releases
                else download(PAIRS, keep or Path(scratch)),
                lambda text: tokenizer.encode(text, add_special=False, parse_special=False),
            )
    except (MeshError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if not edits:
        raise click.ClickException("the releases have no file in common that changed")
    say(f"{len(edits)} edits")
    rows = []
    for width in widths:
        rows.append(figures(measure(edits, width, options), width))
        say(as_line(rows[-1]))
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
