"""Turns of agents in a network of their own: its server and the agent, and nothing else but loopback."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.serve.options import demo_model
from meshbench.lab.host import Host
from meshbench.lab.systems import COMMAND, health_watcher, wait_until
from stages.files import write_private_file
from tests.qualification.coding_agents.engines import COPY, NOTE, note_text
from tests.qualification.coding_agents.model_kinds import NOTE as NOTED
from tests.qualification.coding_agents.npm_install import programs_folder
from tests.qualification.coding_agents.recording import read_recording
from tests.qualification.programs import program_command

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from tests.qualification.coding_agents.agents import AgentOutput, AgentProgram
    from tests.qualification.coding_agents.model_kinds import ModelKind
    from tests.qualification.coding_agents.recording import Exchange

_PORT: Final = 8000
_SERVER: Final = "tests.qualification.coding_agents.recorded_server"
_START_S: Final = 300.0
_STOP_S: Final = 60.0
_VERSION_S: Final = 60.0
# Agents ask for titles beside their work.
_SLOTS: Final = 2
_ANSWERS_AT_ONCE: Final = 8
_ANSWER_TOKENS: Final = 48
_LAST_LINES: Final = 10
_SYSTEM_PATH: Final = ("/usr/local/bin", "/usr/bin", "/bin")


class TurnKind(Enum):
    """A kind of turn; the value is the prompt."""

    PLAIN = "Say in one short sentence what a mesh is. Use no tools."
    TOOL = f"Copy {NOTE} to {COPY} with your shell, and tell me the code word that is in it."


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """What all turns have in common."""

    agents: Path
    """Folder in which the agents are installed."""
    output: Path
    """Folder for recordings and logs."""
    ctx_size: int
    """Positions of a session of the real mesh."""
    time_limit_s: float
    """Longest turn."""
    kinds: Sequence[TurnKind] = tuple(TurnKind)
    """Kinds of turn, in order."""
    models: Sequence[ModelKind] = (NOTED,)
    """Kinds of scripted models, each for a turn with a tool."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of an agent."""

    program: AgentProgram
    """The agent."""
    version: str
    """What it says of its version."""
    kind: TurnKind
    """Kind of turn."""
    model: ModelKind | None
    """Kind of the scripted model; None of a turn on a real mesh."""
    exit_code: int | None
    """Its exit code; None if the time limit ended it."""
    seconds: float
    """Time from its start to its end."""
    output: AgentOutput
    """What it printed."""
    exchanges: Sequence[Exchange]
    """What it asked the server, and what it got."""
    code_word: str
    """The word that it had to find."""
    copied: str | None
    """Content of the copy; None without one."""
    last_words: str
    """End of its error output."""


class _Setting:
    """A host, and what an agent needs on it.

    Args:
        host: The host.
        program: The agent.
        options: Options of all turns.
        scratch: Folder for keys, homes and working directories; nothing above it is a repository.
    """

    def __init__(self, host: Host, program: AgentProgram, options: TurnOptions, scratch: Path) -> None:
        self._host = host
        self._program = program
        self._options = options
        self._scratch = scratch
        key = f"sk-{secrets.token_hex(16)}"
        self._server_keys, self._agent_key = scratch / "server-keys", scratch / "agent-key"
        add_key(self._server_keys, KeyRecord("agent", digest_of(key), max_concurrent=_ANSWERS_AT_ONCE))
        write_private_file(self._agent_key, f"{key}\n")

    def version(self) -> str:
        """What the agent says of its version; empty if it does not."""
        home = self._scratch / "version"
        home.mkdir()
        argv = self._in_clean_environment(home, home, [self._program.name, "--version"])
        process = self._host.run(argv, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            printed, _errors = process.communicate(timeout=_VERSION_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _errors = process.communicate()
        return printed.decode("utf-8", "replace").strip()

    def turn(self, kind: TurnKind, model: ModelKind | None, version: str) -> Turn:
        """One turn, against a server of its own."""
        name = f"{self._program.name}-{kind.name.lower()}"
        if model is not None:
            name += f"-{model.name}"
        recording = self._options.output / f"{name}.requests.jsonl"
        recording.unlink(missing_ok=True)
        home, work = self._scratch / f"{name}-home", self._scratch / f"{name}-work"
        home.mkdir()
        work.mkdir()
        word = secrets.token_hex(4)
        (work / NOTE).write_text(note_text(word), encoding="utf-8")
        with self._server(model, recording, self._options.output / f"{name}.server.log"):
            began_s = time.monotonic()
            exit_code, printed, errors = self._run_agent(kind, name, home, work)
            seconds = time.monotonic() - began_s
        # What the agent left behind.
        self._host.signal_all(signal.SIGKILL)
        copy = work / COPY
        return Turn(
            program=self._program,
            version=version,
            kind=kind,
            model=model,
            exit_code=exit_code,
            seconds=seconds,
            output=self._program.output(printed),
            exchanges=read_recording(recording),
            code_word=word,
            copied=_text_of(copy) if copy.exists() else None,
            # Without the name of a folder that is gone when the report is read.
            last_words="\n".join(errors.splitlines()[-_LAST_LINES:]).replace(str(self._scratch), "SCRATCH"),
        )

    @contextmanager
    def _server(self, model: ModelKind | None, recording: Path, log: Path) -> Iterator[None]:
        if model is None:
            arguments = self._mesh_arguments(recording)
        else:
            arguments = self._scripted_arguments(recording, model)
        with log.open("wb") as output:
            server = self._host.run(program_command(_SERVER, *arguments), stdout=output, stderr=output)
        try:
            watcher = self._host.run(health_watcher(_PORT))
            try:
                wait_until(
                    lambda: watcher.poll() == 0,
                    "the server of the turn",
                    server,
                    log,
                    _START_S,
                )
            finally:
                watcher.kill()
                watcher.wait()
            yield
        finally:
            _end(server)

    def _mesh_arguments(self, recording: Path) -> list[str]:
        return [
            *("mesh", str(recording), str(_ANSWER_TOKENS)),
            *("--port", str(_PORT), "--advertise", "127.0.0.1", "--api-key-file", str(self._server_keys)),
            *("--ctx-size", str(self._options.ctx_size), "--parallel", str(_SLOTS)),
        ]

    def _scripted_arguments(self, recording: Path, model: ModelKind) -> list[str]:
        file = model.write_model(demo_model(), self._scratch)
        return ["scripted", str(recording), str(_PORT), str(self._server_keys), model.name, str(file)]

    def _run_agent(self, kind: TurnKind, name: str, home: Path, work: Path) -> tuple[int | None, str, str]:
        """Run the agent to its end; returns its exit code and both outputs."""
        given = ["--url", f"http://127.0.0.1:{_PORT}", "--api-key-file", str(self._agent_key)]
        own = [self._program.name, *self._program.arguments(kind.value)]
        argv = self._in_clean_environment(home, work, [COMMAND, "agent", *given, *own])
        printed = self._options.output / f"{name}.output.txt"
        errors = self._options.output / f"{name}.errors.txt"
        with printed.open("wb") as stdout, errors.open("wb") as stderr:
            process = self._host.run(argv, cwd=work, stdout=stdout, stderr=stderr)
        exit_code: int | None
        try:
            exit_code = process.wait(self._options.time_limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return exit_code, _text_of(printed), _text_of(errors)

    def _in_clean_environment(self, home: Path, work: Path, argv: Sequence[str]) -> list[str]:
        """A command without variables of this process, which may be meant for other servers."""
        variables = agent_environment(self._options.agents, home, work, self._program.environment)
        return ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), *argv]


def take_turns(program: AgentProgram, options: TurnOptions) -> Generator[Turn, None, None]:
    """Let an agent take its turns.

    Args:
        program: The agent.
        options: Options of all turns.

    Raises:
        MeshError: If the system refuses the namespaces, or a server does not start.
    """
    with TemporaryDirectory(prefix="spanmesh-agents-") as name:
        scratch = Path(name)
        with _loopback_host((scratch, options.agents, options.output)) as host:
            setting = _Setting(host, program, options, scratch)
            version = setting.version()
            for kind in options.kinds:
                for model in options.models if kind is TurnKind.TOOL else (None,):
                    yield setting.turn(kind, model, version)


@contextmanager
def _loopback_host(shared: Sequence[Path]) -> Iterator[Host]:
    """A host whose network is loopback alone; every process on it ends with the block."""
    host = Host("agents", shared)
    try:
        host.configure(["ip", "link", "set", "lo", "up"])
        yield host
    finally:
        host.close()


def agent_environment(agents: Path, home: Path, work: Path, own: Mapping[str, str]) -> dict[str, str]:
    """All environment variables of an agent.

    Args:
        agents: Folder in which it is installed.
        home: Its home.
        work: Its working directory.
        own: Variables of this agent.
    """
    node = shutil.which("node")
    folders = [str(programs_folder(agents)), *([] if node is None else [str(Path(node).parent)])]
    return {
        "PATH": os.pathsep.join(dict.fromkeys((*folders, *_SYSTEM_PATH))),
        "HOME": str(home),
        "PWD": str(work),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **own,
    }


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, and after a while the end."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
