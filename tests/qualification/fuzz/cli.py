"""`mesh bench fuzz`: its options and output."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Final

import click

from mesh.util.printable import say
from meshbench.experiment import end_on_sigterm
from meshbench.shared_options import model_argument, output_option, seed_option

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

_CASES = click.IntRange(1)
# Each is an option of `mesh bench fuzz` of the same name; imported only when it is asked for.
_KINDS: Final = {
    "http": "tests.qualification.fuzz.http_fuzz:fuzz_http",
    "grpc": "tests.qualification.fuzz.grpc_fuzz:fuzz_grpc",
    "gguf": "tests.qualification.fuzz.gguf_fuzz:fuzz_ggufs",
    "drafters": "tests.qualification.fuzz.drafter_fuzz:fuzz_drafters",
    "tokens": "tests.qualification.fuzz.token_fuzz:fuzz_tokens",
    "texts": "tests.qualification.fuzz.text_fuzz:fuzz_texts",
    "flood": "tests.qualification.fuzz.flood:fuzz_flood",
    "kills": "tests.qualification.fuzz.worker_kills:fuzz_kills",
    "prompts": "tests.qualification.fuzz.prompt_fuzz:fuzz_prompts",
    "pictures": "tests.qualification.fuzz.picture_fuzz:fuzz_pictures",
    "encoders": "tests.qualification.fuzz.picture_fuzz:fuzz_encoders",
    "picture_parts": "tests.qualification.fuzz.picture_fuzz:fuzz_picture_parts",
}


@click.command()
@model_argument
@click.option(
    "--http", type=_CASES, metavar="N", help="Number of API requests, derived from its OpenAPI document."
)
@click.option(
    "--grpc", type=_CASES, metavar="N", help="Number of frames to the stages, from a peer with their key."
)
@click.option(
    "--gguf", type=_CASES, metavar="N", help="Number of model files: damaged, inconsistent and truncated."
)
@click.option(
    "--drafters", type=_CASES, metavar="N", help="Number of drafter files, damaged likewise, for MODEL."
)
@click.option(
    "--tokens", type=_CASES, metavar="N", help="Number of join tokens: mistyped, damaged and random."
)
@click.option(
    "--texts",
    type=_CASES,
    metavar="N",
    help="Number of API requests with texts that are hard to read, from clients that hang up.",
)
@click.option(
    "--prompts",
    type=_CASES,
    metavar="N",
    help="Number of conversations, compared with what reaches the model through each API.",
)
@click.option(
    "--pictures", type=_CASES, metavar="N", help="Number of files of pictures, damaged and hostile."
)
@click.option(
    "--encoders",
    type=_CASES,
    metavar="N",
    help="Number of pictures of odd sizes, for projectors of four kinds.",
)
@click.option(
    "--picture-parts",
    type=_CASES,
    metavar="N",
    help="Number of requests with pictures, and what is none, to the three APIs.",
)
@click.option(
    "--flood",
    type=_CASES,
    metavar="SECONDS",
    help="Length of each of four turns of a flood of the largest bodies, beside streams of another key.",
)
@click.option(
    "--kills",
    type=_CASES,
    metavar="N",
    help="Number of kills of the processes that read bodies and texts, beside streams.",
)
@seed_option("Of all randomness.")
@output_option("bench-fuzz", "Folder for failing inputs and logs.")
@click.option("--json", "is_json", is_flag=True, help="Print the reports as JSON.")
def fuzz(*, model: Path | None, seed: int, output: Path, is_json: bool, **num_cases: int | None) -> None:
    """Feed N inputs of each kind that is named; what serves a model serves MODEL, or the demo's.

    Everything starts on this machine for the run and ends with it. Failing inputs are kept. Exits with 1 if
    something crashed, hung, was blamed on the server, or if memory grew.
    """
    wanted = {kind: count for kind, count in num_cases.items() if count is not None}
    if not wanted:
        raise click.UsageError("give at least one kind and its number, such as --http 10000")
    from mesh.serve.options import demo_model  # noqa: PLC0415
    from tests.qualification.fuzz.report import FuzzOptions, as_dict, as_text  # noqa: PLC0415

    end_on_sigterm()
    output.mkdir(parents=True, exist_ok=True)
    model = model or demo_model()
    reports = []
    for kind, count in wanted.items():
        report = feed(kind, FuzzOptions(count, seed, model, output))
        reports.append(report)
        if not is_json:
            say(as_text(report))
    if is_json:
        say(json.dumps([as_dict(report) for report in reports], indent=2))
    if not all(report.is_good for report in reports):
        click.get_current_context().exit(1)


def feed(kind: str, options: FuzzOptions) -> FuzzReport:
    """Feed one kind of hostile input.

    Args:
        kind: Such as `http`.
        options: What the user says.

    Raises:
        MeshError: If what is to be tested does not start.
    """
    module, _, name = _KINDS[kind].partition(":")
    function: Callable[[FuzzOptions], FuzzReport] = getattr(importlib.import_module(module), name)
    return function(options)
