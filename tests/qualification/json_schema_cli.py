"""`mesh bench schemas`: its options and output."""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from pathlib import Path

import click

from meshbench.experiment import end_on_sigterm
from meshbench.shared_options import model_argument


@click.command()
@model_argument
@click.option(
    "--requests",
    type=click.IntRange(1, 200),
    default=200,
    show_default=True,
    help="Number of questions, over 20 schemas.",
)
@click.option("--concurrency", type=click.IntRange(1, 8), default=2, show_default=True, help="At once.")
@click.option("--draft", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A draft model.")
@click.option("--compare/--no-compare", default=True, show_default=True, help="Also ask without speculation.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write figures.")
def schemas(
    *,
    model: Path | None,
    requests: int,
    concurrency: int,
    draft: Path | None,
    compare: bool,
    json_path: Path | None,
) -> None:
    """Ask a mesh of two stages on this machine, in exact mode, for answers that keep to JSON Schemas.

    Each is validated, and asked again without speculation: the text must be the same. MODEL is the demo's
    unless given. Exits with 1 if an answer is not valid, or differs.
    """
    from mesh.serve.options import demo_model  # noqa: PLC0415
    from meshbench.lab.local_mesh import served_mesh  # noqa: PLC0415
    from tests.qualification.json_schema_conformance import SchemaResult, ask_all, summary  # noqa: PLC0415 - keeps --help quick

    end_on_sigterm()
    key = secrets.token_urlsafe(32)
    # A fixed width and depth: on one machine proposing would not pay, and so would hardly be tried.
    options = [
        "--stages",
        "2",
        "--exact",
        "--ctx-size",
        "1024",
        "--set",
        "spec-width=4",
        "--set",
        "spec-depth=3",
    ]
    options += ["--threads", "1", "--parallel", str(concurrency), *(["--draft", str(draft)] if draft else [])]

    def tell(result: SchemaResult) -> None:
        if result.fault is not None:
            click.echo(f"not valid ({result.case.name}): {result.fault}: {result.answer.text}")
        if not result.is_same:
            click.echo(f"another text without speculation ({result.case.name}): {result.answer.text}")

    started_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        served_mesh(model or demo_model(), Path(folder), key, options) as mesh,
    ):
        results = ask_all(
            mesh.port, requests, api_key=key, num_at_once=concurrency, compares=compare, on_result=tell
        )
    found = summary(results)
    click.echo(
        f"{found['valid']} of {found['questions']} answers in {found['schemas']} schemas are valid,"
        f" {found['same_without_speculation']} the same without speculation; {found['tokens']} tokens;"
        f" {found['accepted']} proposed tokens accepted, {found['rejected']} rejected;"
        f" {time.monotonic() - started_s:.0f} s"
    )
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if found["faults"] or found["different"]:
        click.get_current_context().exit(1)
