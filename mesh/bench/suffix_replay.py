"""`python -m mesh.bench.suffix_replay`: what the n-gram proposer makes of rewritten files. Needs no hosts.

A file of one release of a package is the prompt, the same file in a later release is what a model would
answer: a full rewrite with the changes that its authors made. The text is tokenised as the served model would
and replayed window by window. The releases are fetched by pip, or two folders are given.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.bench.offline_replay import ReplayTotals, median_and_p99, replay
from mesh.bench.release_edits import PAIRS, download, edits_between, read_folder
from mesh.serve.options import demo_model
from mesh.text.tokenizer import Tokenizer
from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import MeshError
from speculative.lookup_proposers import NgramOptions, NgramProposer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mesh.bench.release_edits import FileEdit

# Longer files do not fit a session together with their rewrite.
MAX_FILE_TOKENS: Final = 8192
MIN_FILE_TOKENS: Final = 64
DEFAULT_WIDTHS: Final = (8, 16, 32, 64)

TokenEdit = tuple[list[int], list[int]]


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


_FOLDER: Final = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Whose vocabulary cuts the text; by default the demo's.",
)
@click.option(
    "--releases", nargs=2, type=_FOLDER, multiple=True, metavar="OLD NEW", help="Folders of a package."
)
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep downloads in this folder."
)
@click.option(
    "--widths",
    default=",".join(map(str, DEFAULT_WIDTHS)),
    show_default=True,
    callback=_widths,
    help="Most proposed tokens in a window.",
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
    click.echo(f"{len(edits)} edits")
    rows = []
    for width in widths:
        rows.append(figures(measure(edits, width, options), width))
        click.echo(as_line(rows[-1]))
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
