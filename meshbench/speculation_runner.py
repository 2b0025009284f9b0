"""Runner of a speculation plan, on meshes in the lab or on one that runs already."""

from __future__ import annotations

import itertools
import json
import secrets
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from meshbench.lab.systems import MeshSystem, RpcSystem, in_place_of
from meshbench.load_client.schedule import Request
from meshbench.speculation_plan import in_turn
from meshbench.speculation_results import LLAMA_RPC, MESH, OFF, REPLAY, ConcurrentRequests, Sample
from meshbench.under_test.mesh import LabMesh
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshbench.lab.llama_cpp_build import LlamaRpc
    from meshbench.lab.network import Lab
    from meshbench.load_client.answers import AnswerRecord, Outcome
    from meshbench.load_client.client import LoadClient
    from meshbench.speculation_plan import ConcurrentTrial, PeerSetting, Phase, Trial
    from meshbench.speculation_results import Results, Setting
    from meshbench.speculation_workloads import Question, Workload
    from meshbench.under_test.mesh import MeshUnderTest

_WARM_UP: Final = "Describe a house by the sea."
_WARM_UP_TOKENS: Final = 48
_MAX_FAILURES: Final = 3
# Answers go on to their last token, so that all have the same length.
_WHOLE: Final[dict[str, Any]] = {"ignore_eos": True}
# Tokens of each answer while settings are compared: enough for the comparison.
_NUM_TOKENS: Final = 48

log = structlog.get_logger()


@dataclass(frozen=True)
class RunnerOptions:
    """Parts shared by all phases."""

    model: Path
    """A GGUF."""
    split: tuple[int, ...]
    """Layers of each stage."""
    num_threads: int
    """Of each stage."""
    num_tokens: int
    """Of each answer."""
    ctx_size: int
    """Positions of a session."""
    against: Path | None = None
    """Another checkout, whose mesh is measured in turn with this one; None without."""


@dataclass(frozen=True)
class OtherMesh:
    """The mesh of another checkout on the same hosts, paused while it is not measured."""

    processes: MeshSystem
    """Of the mesh under test."""
    mesh: LabMesh
    """The other one."""

    @property
    def name(self) -> str:
        """For tables."""
        return self.mesh.system.name

    @contextmanager
    def running(self) -> Iterator[MeshUnderTest]:
        """It, in place of the mesh under test."""
        with in_place_of(self.processes, self.mesh.system):
            yield self.mesh


class TrialRunner:
    """Runs the trials of a phase on a mesh that is up, into `results`.

    Args:
        client: LoadClient of the mesh.
        num_tokens: Of each answer.
        results: Record of the measurements.
        lab: Whose delays each trial sets; None where links are what they are, and trials have their delay.
        replay: Where answers under `off` are recorded for the phases that replay them; None if none does.
        peer: llama.cpp RPC, if trials need it.
    """

    def __init__(
        self,
        client: LoadClient,
        num_tokens: int,
        results: Results,
        *,
        lab: Lab | None = None,
        replay: ReplayFile | None = None,
        peer: Peer | None = None,
    ) -> None:
        self._client = client
        self._num_tokens = num_tokens
        self._results = results
        self._lab = lab
        self._replay = replay
        self._peer = peer
        self._turns = itertools.count()
        self._delay_ms = 0.0
        self._settled: set[Setting] = set()
        self._num_failures = 0
        self._other: OtherMesh | None = None

    def run(self, mesh: MeshUnderTest, phase: Phase, other: OtherMesh | None = None) -> None:
        """Measure; a trial that fails is noted and passed over, up to a bound.

        Args:
            mesh: The mesh under test.
            phase: Its trials.
            other: Another mesh that answers the questions of all trials, too, but not many at once.

        Raises:
            MeshError: If a mesh does not answer at all, or too many trials have failed.
        """
        self._num_failures = 0
        self._settled.clear()
        self._other = other
        self._warm_up_all(mesh, OFF)
        for trial in phase.trials:
            self._run_trial(mesh, phase.server, trial)
        for concurrent_trial in phase.concurrent_trials:
            self._run_concurrent(mesh, concurrent_trial)

    def warm_up(self, mesh: MeshUnderTest, setting: Setting) -> AnswerRecord:
        """An answer under a setting that is not measured.

        A first answer is slow for unrelated reasons; and the delay of a real mesh does not change at once, so
        each setting may learn the new one before it is measured.

        Raises:
            MeshError: If there is none.
        """
        fields = {**_WHOLE, **mesh.fields, **setting.fields}
        asked = Request.chat(_WARM_UP, min(_WARM_UP_TOKENS, self._num_tokens), fields)
        return self._ask_batch(mesh, (asked,)).answers[0]

    def _warm_up_all(self, mesh: MeshUnderTest, setting: Setting) -> None:
        self.warm_up(mesh, setting)
        if self._other is not None:
            with self._other.running() as other:
                self.warm_up(other, setting)

    def _run_trial(self, mesh: MeshUnderTest, server: str, trial: Trial) -> None:
        self._settle(mesh, trial.delay_ms, trial.settings)
        workload = trial.workload
        log.info("trial", server=server, workload=workload.name, delay_ms=trial.delay_ms)
        for question in workload.questions:
            with self._forgiving(f"{server}, {workload.name} {question.id} at {trial.delay_ms:g} ms"):
                if workload.is_warm:
                    self._ask_mesh(mesh, workload, question, trial.settings[0], trial.sampling)
                self._turn(mesh, server, trial, question)

    def _turn(self, mesh: MeshUnderTest, server: str, trial: Trial, question: Question) -> None:
        turn = next(self._turns)
        where = {
            "turn": turn,
            "workload": trial.workload.name,
            "question": question.id,
            "delay_ms": trial.delay_ms,
            "is_raw": trial.workload.is_raw,
            "is_warm": trial.workload.is_warm,
            "temperature": trial.temperature,
        }

        def answered_by(system: str, mesh: MeshUnderTest) -> list[Sample]:
            return [
                Sample.of(
                    self._ask_mesh(mesh, trial.workload, question, setting, trial.sampling),
                    system=system,
                    server=server,
                    setting=setting.name,
                    **where,
                )
                for setting in in_turn((OFF, *trial.settings), turn)
            ]

        samples = answered_by(MESH, mesh)
        if self._other is not None:
            with self._other.running() as other:
                samples += answered_by(self._other.name, other)
        if trial.with_peer and self._peer is not None:
            system, name = self._peer.best
            with self._peer.running():
                reply = self._ask_peer(system, trial.workload, question, trial.sampling)
            samples.append(Sample.of(reply.answers[0], system=LLAMA_RPC, server=name, setting=name, **where))
        self._results.samples += samples
        log.info(
            "turn",
            workload=trial.workload.name,
            question=question.id,
            delay_ms=trial.delay_ms,
            **{f"{sample.system} {sample.setting}": round(sample.tokens_per_s, 1) for sample in samples},
        )

    def _run_concurrent(self, mesh: MeshUnderTest, concurrent_trial: ConcurrentTrial) -> None:
        self._settle(mesh, concurrent_trial.delay_ms, (concurrent_trial.setting,))
        with self._forgiving(
            f"{concurrent_trial.num_at_once} requests at once at {concurrent_trial.delay_ms:g} ms"
        ):
            for number in range(concurrent_trial.num_rounds):
                replies = {
                    setting: self._ask_together(mesh, concurrent_trial, setting)
                    for setting in in_turn((OFF, concurrent_trial.setting), number)
                }
                off, on = replies[OFF], replies[concurrent_trial.setting]
                found = ConcurrentRequests(
                    num_at_once=concurrent_trial.num_at_once,
                    delay_ms=concurrent_trial.delay_ms,
                    setting=concurrent_trial.setting.name,
                    off_tokens_per_s=off.tokens_per_s,
                    tokens_per_s=on.tokens_per_s,
                    num_forks=sum(a.text != b.text for a, b in zip(off.answers, on.answers, strict=True)),
                )
                self._results.groups.append(found)
                log.info(
                    "concurrent_requests", at_once=concurrent_trial.num_at_once, ratio=round(found.ratio, 3)
                )

    def _ask_together(
        self, mesh: MeshUnderTest, concurrent_trial: ConcurrentTrial, setting: Setting
    ) -> Outcome:
        questions = itertools.islice(
            itertools.cycle(concurrent_trial.workload.questions), concurrent_trial.num_at_once
        )
        fields = {"temperature": 0, **_WHOLE, **mesh.fields, **setting.fields}
        requests = [self._request(concurrent_trial.workload, question, fields) for question in questions]
        return self._ask_batch(mesh, requests, num_at_once=concurrent_trial.num_at_once)

    def _ask_mesh(
        self,
        mesh: MeshUnderTest,
        workload: Workload,
        question: Question,
        setting: Setting,
        sampling: dict[str, Any],
    ) -> AnswerRecord:
        # In each setting, so that all requests are alike; llama.cpp does not know the field.
        fields = {**sampling, **_WHOLE, **mesh.fields, **setting.fields, "return_token_ids": True}
        request = self._request(workload, question, fields)
        answer = self._ask_batch(mesh, (request,)).answers[0]
        if setting == OFF and self._replay is not None:
            self._replay.record(request, answer)
        return answer

    def _ask_batch(
        self, mesh: MeshUnderTest, requests: Sequence[Request], *, num_at_once: int = 1
    ) -> Outcome:
        key = mesh.api_keys[0]
        return self._client.answer(mesh.url, requests, num_at_once=num_at_once, api_key=key)

    def _ask_peer(
        self, system: RpcSystem, workload: Workload, question: Question, sampling: dict[str, Any]
    ) -> Outcome:
        request = self._request(workload, question, {**sampling, **system.fields})
        return self._client.answer(system.url, (request,))

    def _request(self, workload: Workload, question: Question, fields: dict[str, Any]) -> Request:
        most = {"max_tokens": self._num_tokens}
        return Request.streamed({**question.content, **workload.fields, **most, **fields}, workload.path)

    def _settle(self, mesh: MeshUnderTest, delay_ms: float, settings: Sequence[Setting]) -> None:
        """Change the delay, and have the settings learn of it; but `replay`, which has nothing to learn."""
        if delay_ms != self._delay_ms:
            self._settled.clear()
        self._delay_ms = delay_ms
        if self._lab is not None:
            self._lab.set_delay_ms(delay_ms)
        for setting in settings:
            if setting.mode != REPLAY.mode and setting not in self._settled:
                self._warm_up_all(mesh, setting)
        self._settled.update(settings)
        if self._lab is not None and delay_ms not in self._results.hops_ms:
            self._results.hops_ms[delay_ms] = self._lab.round_trip_ms(0, 1) / 2

    @contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        """Record a failure and continue, up to a bound."""
        try:
            yield
        except MeshError as error:
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                raise
            log.warning("not_measured", what=what, reason=error.message)
            self._results.failures.append(f"{what}: {error.message}")


class Runner:
    """Runs phases in the lab, one after the other, each on a mesh of its own.

    Args:
        lab: Host 0 is the head, every other one a stage.
        trials: Runs the trials of each phase.
        options: What holds for all phases.
        logs: Directory for what the processes write, seen by all hosts.
        results: Record of the measurements.
        replay: Answers for the phases that replay some.
    """

    def __init__(
        self,
        lab: Lab,
        trials: TrialRunner,
        options: RunnerOptions,
        logs: Path,
        results: Results,
        *,
        replay: ReplayFile,
    ) -> None:
        self._lab = lab
        self._trials = trials
        self._options = options
        self._logs = logs
        self._results = results
        self._replay = replay
        # A history belongs to a key; other meshes are not affected by one.
        self._api_key = secrets.token_hex()

    def run(self, phase: Phase) -> None:
        """Start the phase's mesh, measure, and stop it. What fails is noted and passed over.

        On Ctrl-C it leaves the mesh to the lab, which ends every process anyway: there is a report to write.
        """
        log.info("phase", server=phase.server, trials=len(phase.trials), crowds=len(phase.concurrent_trials))
        # A draft model that was made for this run is gone after it, and folders are this machine's.
        self._results.servers[phase.server] = tuple(map(_without_folder, phase.options))
        folder = self._logs / phase.server.replace(" ", "-")
        options = list(phase.options)
        if phase.replays:
            options += ["--set", f"replay-file={self._replay.path}"]
        mesh = self._mesh(options, folder)
        beside: MeshSystem | None = None
        if phase.beside is not None:
            self._results.servers[phase.beside.name] = tuple(map(_without_folder, phase.beside.options))
            beside = self._mesh(phase.beside.options, folder / "beside", name=phase.beside.name)
        elif self._options.against is not None:
            beside = self._mesh(options, folder / "against", checkout=self._options.against)
        other: OtherMesh | None = None
        try:
            self._lab.set_delay_ms(0.0)
            if beside is not None:
                other = OtherMesh(mesh, self._under_test(beside))
                other.mesh.system.start()
                other.mesh.system.pause()
            mesh.start()
            self._trials.run(self._under_test(mesh), phase, other)
            mesh.stop()
        except MeshError as error:
            log.warning("phase_failed", server=phase.server, reason=error.message)
            self._results.failures.append(f"{phase.server}: {error.message}")
            with suppress(MeshError):
                mesh.stop()
            mesh.kill()
        if other is not None:
            other.mesh.system.kill()

    def _mesh(
        self, options: Sequence[str], folder: Path, *, checkout: Path | None = None, name: str | None = None
    ) -> MeshSystem:
        folder.mkdir(parents=True, exist_ok=True)
        return MeshSystem(
            self._lab,
            self._options.model,
            folder,
            num_threads=self._options.num_threads,
            split=self._options.split,
            options=[*options, "--ctx-size", str(self._options.ctx_size)],
            api_key=self._api_key,
            checkout=checkout,
            name=name,
        )

    def _under_test(self, mesh: MeshSystem) -> LabMesh:
        return LabMesh(self._lab, mesh, (self._api_key,))


class Peer:
    """llama.cpp RPC on the lab's hosts, one setting at a time.

    Args:
        lab: Where.
        client: LoadClient on the head's host.
        programs: Programs of llama.cpp RPC.
        options: Model, threads and lengths, as for the mesh.
        logs: Directory for what the processes write.
    """

    def __init__(
        self, lab: Lab, client: LoadClient, programs: LlamaRpc, options: RunnerOptions, logs: Path
    ) -> None:
        self._lab = lab
        self._client = client
        self._programs = programs
        self._options = options
        self._logs = logs
        self._best: tuple[RpcSystem, str] | None = None

    @property
    def best(self) -> tuple[RpcSystem, str]:
        """The fastest setting that `choose` found, up and paused, with its name.

        Raises:
            MeshError: If none was found.
        """
        if self._best is None:
            raise MeshError("llama.cpp RPC could not be measured")
        return self._best

    def choose(
        self, settings: Sequence[PeerSetting], workloads: Sequence[Workload], delay_ms: float
    ) -> dict[str, float | str]:
        """Have each setting answer the first question of each workload, and keep the fastest running.

        Returns:
            By setting, tokens per second over all its answers, or why it gave none.
        """
        rates: dict[str, float | str] = {}
        for setting in settings:
            system = self._system(setting)
            try:
                self._start(system, delay_ms)
                rates[setting.name] = self._rate(system, workloads)
            except MeshError as error:
                rates[setting.name] = error.message.splitlines()[0]
            finally:
                system.stop()
            log.info("peer", setting=setting.name, tokens_per_s=rates[setting.name])
        measured = {name: rate for name, rate in rates.items() if isinstance(rate, float)}
        if measured:
            name = max(measured, key=lambda name: measured[name])
            best = self._system(next(setting for setting in settings if setting.name == name))
            self._start(best, delay_ms)
            best.pause()
            self._best = best, name
        return rates

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the best setting's processes run meanwhile."""
        system, _name = self.best
        system.resume()
        try:
            yield
        finally:
            system.pause()

    def stop(self) -> None:
        """End the processes."""
        if self._best is not None:
            self._best[0].stop()

    def _system(self, setting: PeerSetting) -> RpcSystem:
        folder = self._logs / f"rpc-{setting.name.replace('/', '-')}"
        folder.mkdir(parents=True, exist_ok=True)
        options = self._options
        return RpcSystem(
            self._lab,
            self._programs,
            options.model,
            folder,
            num_threads=options.num_threads,
            options=setting.options,
            ctx_size=options.ctx_size,
        )

    def _start(self, system: RpcSystem, delay_ms: float) -> None:
        """Without delays: loading weights is not measured."""
        self._lab.set_delay_ms(0.0)
        system.start()
        self._lab.set_delay_ms(delay_ms)

    def _rate(self, system: RpcSystem, workloads: Sequence[Workload]) -> float:
        most = min(self._options.num_tokens, _NUM_TOKENS)
        fields = {"temperature": 0, "max_tokens": most, **system.fields}
        requests = [
            Request.streamed({**workload.questions[0].content, **workload.fields, **fields}, workload.path)
            for workload in workloads
        ]
        answers = self._client.answer(system.url, requests).answers
        decode_s = sum(answer.decode_ms for answer in answers) / 1e3
        return sum(answer.num_tokens - 1 for answer in answers) / decode_s


class ReplayFile:
    """Records answers as token ids: their texts may have come from others.

    Args:
        path: The file, which is made anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("", encoding="utf-8")

    def record(self, request: Request, answer: AnswerRecord) -> None:
        """Note the answer to a request.

        Raises:
            MeshError: If its tokens are not all there.
        """
        if len(answer.token_ids) != answer.num_tokens:
            raise MeshError(
                f"an answer of {answer.num_tokens} tokens came with {len(answer.token_ids)} token ids:"
                " ask for them with return_token_ids"
            )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"ask": json.loads(request.body), "tokens": answer.token_ids}) + "\n")


def _without_folder(option: str) -> str:
    return Path(option).name if option.startswith("/") else option
