"""`mesh bench serve`: its options and output."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from mesh.cli.shared_options import Numbers, ParsedText, choice_option, float_option, int_option, key_of
from meshbench.experiment import show
from meshbench.shared_options import FOLDER, Url, goodput_option, json_option, seed_option


class _Positive(ParsedText[float]):
    """A number above 0, `inf` included."""

    name = "number"

    def parse(self, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not number > 0:
            raise ValueError(f"{text} is not a number above 0")
        return number


class _JsonObject(ParsedText[dict[str, Any]]):
    """`{"top_k": 20}`."""

    name = "json"

    def parse(self, text: str) -> dict[str, Any]:
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{text!r} is not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise ValueError(f'{text!r} is not a JSON object such as {{"top_k": 20}}')  # noqa: TRY004 - of the text
        return fields


@click.command()
@click.option(
    "--url",
    "server",
    type=Url(),
    default="http://127.0.0.1:8000",
    show_default=True,
    help="URL of the server.",
)
@choice_option(
    "--endpoint",
    choices=("chat", "completions"),
    default="chat",
    help="/v1/chat/completions or /v1/completions.",
)
@click.option("--model", metavar="NAME", help="Name of the model; the server's first unless given.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File whose first key is sent to the server; or set MESH_API_KEY.",
)
@int_option("--requests", "num_requests", default=64, help="Requests to measure.")
@int_option(
    "--concurrency",
    metavar="N",
    help="Concurrent requests: this number without --rate (1 unless given), at most this number with it.",
)
@click.option(
    "--rate",
    type=_Positive(),
    metavar="R",
    help="Requests per second, sent on schedule regardless of the server; `inf` sends all at once.",
)
@click.option(
    "--burstiness",
    type=_Positive(),
    default=1.0,
    show_default=True,
    metavar="B",
    help="Burstiness of --rate: 1 is a Poisson process, below 1 comes in bursts, above 1 more "
    "evenly, `inf` at constant intervals.",
)
@int_option(
    "--warmup",
    "num_warmup",
    least=0,
    default=0,
    metavar="N",
    help="Warm-up requests before those measured, with other prompts.",
)
@click.option(
    "--dataset",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="JSON lines with `prompt`, `messages` or Spec-Bench's `turns`; random prompts unless given.",
)
@int_option("--prompt-tokens", default=128, metavar="N", help="Length of each random prompt, about.")
@int_option("--max-tokens", default=128, metavar="N", help="Maximum of tokens per answer.")
@click.option("--ignore-eos", is_flag=True, help="Continue answers to --max-tokens, if the server can.")
@float_option("--temperature", least=0, most=100, metavar="T", help="The server's default unless given.")
@click.option(
    "--extra-body", type=_JsonObject(), metavar="JSON", help="More fields of each request: '{\"top_k\": 20}'."
)
@seed_option("Seed of prompts, order and arrival times.")
@click.option(
    "--timeout",
    "timeout_s",
    type=_Positive(),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Limit of a request; a longer one counts as failed.",
)
@goodput_option
@click.option(
    "--percentiles",
    type=Numbers(float, 0.0, 100.0),
    default=(50.0, 90.0, 99.0),
    metavar="A,B,…",
    help="Percentiles of each latency; 50,90,99 unless given.",
)
@click.option(
    "-o",
    "--output",
    type=FOLDER,
    metavar="FOLDER",
    help="Write report.md, report.json with every request, and plots to this folder.",
)
@json_option
def serve(
    *,
    api_key_file: Path | None,
    temperature: float | None,
    output: Path | None,
    is_json: bool,
    **given: Any,
) -> int:
    """Load an OpenAI server and measure TTFT, TPOT, ITL, E2EL, throughput and goodput.

    Works against any server that streams. Without --rate a closed loop: the next request is sent when one
    ends. With it an open loop: requests are sent at their time, and latencies also count from it. Ctrl-C ends
    the run and reports what was measured. Exits with 1 if no request was answered.
    """
    from meshbench.serving_options import LoadOptions  # noqa: PLC0415 - keeps --help quick
    from meshbench.serving_run import run_load  # noqa: PLC0415

    if temperature is not None and math.isnan(temperature):
        raise click.BadParameter("nan is not a number", param_hint="--temperature")
    key = key_of(api_key_file)
    report, code = run_load(LoadOptions(api_key=key or None, temperature=temperature, output=output, **given))
    if report is not None:
        show(report, is_json=is_json, folder=output)
    return code
