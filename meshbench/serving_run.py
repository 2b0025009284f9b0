"""Run of `mesh bench serve`: preflight, load and report."""

from __future__ import annotations

import datetime as dt
import json
import time
from typing import TYPE_CHECKING, Final

import structlog

from mesh.util.completion_stream import error_message
from mesh.util.tasks import Interruption, run_interruptible
from mesh.util.terminal import ProgressTask, progress_bars
from meshbench.datasets import PATHS, Asking, draw, made_up_prompts, read_dataset
from meshbench.http_client import Client, WholeBody, one_line
from meshbench.load_generator import Job, Load, arrival_times_s
from meshbench.serving_metrics import work_out
from meshbench.serving_report import Findings, RunConditions, serving_report
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import ClusterError, MeshError, ModelNotFound, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshbench.datasets import Prompt
    from meshbench.report_tools import Report
    from meshbench.request_record import Record
    from meshbench.serving_options import LoadOptions

_MODELS_PATH: Final = "/v1/models"
# Warm-up prompts are other ones than those measured: nothing may be in a cache that would not be there.
_WARMUP_SEED_OFFSET: Final = 1_000_003

log = structlog.get_logger()


class _Run:
    """State of a run."""

    def __init__(self, options: LoadOptions, prompts: Sequence[Prompt], progress: ProgressTask) -> None:
        self._options = options
        self._prompts = prompts
        self._progress = progress
        self._records: list[Record] = []
        self._conditions: RunConditions | None = None
        self._duration_s = 0.0
        self._cpu_s = 0.0

    async def work(self, _interruption: Interruption) -> None:
        """Run everything; a cancellation keeps the measurements."""
        options = self._options
        client = Client(
            options.server, api_key=options.api_key, timeout_s=options.timeout_s, clock_s=time.perf_counter
        )
        try:
            model = await find_model(client, options.server.url, options.model)
            asking = Asking(
                options.endpoint,
                model,
                options.max_tokens,
                options.temperature,
                options.ignore_eos,
                options.extra_body,
            )
            await self._warm_up(client, asking)
            await self._load(client, asking)
        finally:
            client.close()

    def report(self) -> Report | None:
        """Measurements of the requests sent."""
        if self._conditions is None or not self._records:
            return None
        figures = work_out(
            self._records, self._duration_s, percentiles=self._options.percentiles, slos=self._options.slos
        )
        records = tuple(sorted(self._records, key=lambda record: record.number))
        return serving_report(Findings(self._conditions, figures, records, self._cpu_s / self._duration_s))

    async def _warm_up(self, client: Client, asking: Asking) -> None:
        options = self._options
        if not options.num_warmup:
            return
        prompts = made_up_prompts(
            options.num_warmup, options.prompt_tokens, options.seed + _WARMUP_SEED_OFFSET
        )
        failed: list[Record] = []

        def note(record: Record) -> None:
            if record.failure is not None:
                failed.append(record)

        load = Load(client, time.perf_counter, note)
        await load.closed_loop(_jobs(prompts, asking), options.concurrency or 1)
        if failed and failed[0].failure is not None:
            log.warning("warm_up_failed", requests=len(failed), first=failed[0].failure.message)

    async def _load(self, client: Client, asking: Asking) -> None:
        options = self._options
        jobs = _jobs(self._prompts, asking)
        self._conditions = self._made(asking.model, len({job.body for job in jobs}))
        load = Load(client, time.perf_counter, self._note)
        cpu_s = time.process_time()
        try:
            if options.rate is None:
                await load.closed_loop(jobs, options.concurrency or 1)
            else:
                arrivals_s = arrival_times_s(len(jobs), options.rate, options.burstiness, options.seed)
                await load.open_loop(jobs, arrivals_s, options.concurrency)
        finally:
            self._duration_s = load.now_s()
            self._cpu_s = time.process_time() - cpu_s

    def _note(self, record: Record) -> None:
        self._records.append(record)
        self._progress(len(self._records) / len(self._prompts))

    def _made(self, model: str, num_prompts: int) -> RunConditions:
        options = self._options
        source = (
            f"random prompts of about {options.prompt_tokens} tokens"
            if options.dataset is None
            else f"prompts of {options.dataset.name} in random order"
        )
        is_open = options.rate is not None
        return RunConditions(
            url=options.server.url,
            endpoint=options.endpoint,
            model=model,
            loop=options.loop_name,
            rate=options.rate,
            burstiness=options.burstiness if is_open else None,
            concurrency=options.concurrency if is_open else options.concurrency or 1,
            num_planned=options.num_requests,
            prompts=source,
            num_prompts=num_prompts,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            extra_body=options.extra_body,
            goodput={slo.name: slo.limit_ms for slo in options.slos},
            seed=options.seed,
            num_warmup=options.num_warmup,
            started_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            software=f"spanmesh {SOFTWARE_VERSION}",
        )


async def find_model(client: Client, url: str, model: str | None) -> str:
    """The model name for requests.

    Args:
        client: Client of the server.
        url: The server's, for errors.
        model: The user's choice; the server's list is not consulted for it, as not every server has one.

    Returns:
        The user's choice, or the first model that the server lists.

    Raises:
        ClusterError: If the server does not answer, or without a list of models.
        Unauthorized: If the API key is missing or wrong.
        ModelNotFound: If the server lists no model and the user names none.
    """
    answer = WholeBody()
    try:
        await client.exchange("GET", _MODELS_PATH, b"", answer)
    except OSError as error:
        reason = "no answer within the limit" if isinstance(error, TimeoutError) else one_line(error)
        raise ClusterError(
            f"no server answers at {url} ({reason}); start one, or give another --url"
        ) from None
    if answer.status in {401, 403}:
        raise Unauthorized(f"{url} needs another API key; give it with --api-key-file or MESH_API_KEY")
    if model is not None:
        return model
    if answer.status != 200:
        raise _refusal(url, answer)
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ModelNotFound(f"{url}{_MODELS_PATH} lists no model; name one with --model") from None


def _refusal(url: str, answer: WholeBody) -> MeshError:
    said = f"{url} answered {answer.status} to {_MODELS_PATH}: {error_message(answer.body) or 'nothing'}"
    if answer.status == 404:
        return ModelNotFound(f"{said}; name the model with --model")
    return ClusterError(f"{said}; try again, or read the server's log")


def run_load(options: LoadOptions) -> tuple[Report | None, int]:
    """Load the server and write the report, of as much as was sent, also when a signal ends it.

    Returns:
        The report, None if a signal came before the first request; and the exit code, 130 after Ctrl-C, 1 if
        no request was answered.

    Raises:
        MeshError: If the dataset or the folder is wrong, or the server does not answer, or refuses the key.
    """
    prompts = _prompts(options)
    if options.output is not None:
        _make_folder(options.output)
    with progress_bars() as bars:
        run = _Run(options, prompts, bars.add("asking"))
        code = run_interruptible(run.work)
    report = run.report()
    if report is not None and options.output is not None:
        report.write(options.output)
    if code == 0 and (report is None or not report.is_good):
        code = 1
    return report, code


def _make_folder(path: Path) -> None:
    """Before the load: no run is to be lost because its report has no place."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MeshError(f"cannot make the folder {path}: {error.strerror}; give another --output") from None


def _prompts(options: LoadOptions) -> tuple[Prompt, ...]:
    if options.dataset is None:
        return made_up_prompts(options.num_requests, options.prompt_tokens, options.seed)
    return draw(read_dataset(options.dataset, options.endpoint), options.num_requests, options.seed)


def _jobs(prompts: Sequence[Prompt], asking: Asking) -> list[Job]:
    """Bodies are written before the load begins: that costs nothing while it runs."""
    path = PATHS[asking.endpoint]
    return [Job(number, prompt.id, path, asking.body(prompt)) for number, prompt in enumerate(prompts)]
