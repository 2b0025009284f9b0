"""What the documents tell a user to type works: commands are run, flags exist, links lead somewhere."""

import importlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import httpx
import numpy as np
import psutil
import pytest

from mesh.cli.agent import AGENTS
from mesh.cli.main import run
from mesh.cli.reference import leaf_commands, rewritten
from mesh.cluster.addresses import free_port
from mesh.tuning.conversation_file import Conversation, ConversationInfo, write_conversation
from mesh.tuning.prompts import read_prompts
from mesh.tuning.recording import RecordingHeader, conversation_path, create_recording, recorded_model
from spanmesh_proto import SOFTWARE_VERSION
from tests.support.short_models import write_short
from tests.support.tiny_models import TinyModel
from tests.support.walk_through import THREE_HOSTS, differences, steps_of

ROOT = Path(__file__).parents[3]
PAGES = tuple(sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
DOCUMENTS = (
    "README.md",
    *PAGES,
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "FAMILIES.md",
    "SECURITY.md",
    "examples/three_hosts.md",
    "examples/speculation_report/report.md",
    "examples/drafter_report/report.md",
    "examples/coding_agents/README.md",
    "examples/device_parity.md",
    "examples/drafter_tuning/README.md",
)
COMMANDS = tuple(leaf_commands())
# Named in the history only, or not moved yet: see tests/suite/test_architecture_page.py.
WITHOUT_PATHS = ("CHANGELOG.md", "docs/architecture.md")
# Every line of a shell block is of one of these kinds, and a test checks each kind: commands of mesh and
# their flags, make targets, modules and theirs, tools of the environment, files of examples/.
SHELL_LINE = re.compile(
    r'mesh \w|make [\w-]+( BACKEND=\w+| ARGS=".*")?$'
    r"|curl |(\.venv/bin/)?python -m \w|\.venv/bin/\w"
    r"|\. \.venv/bin/activate$|python examples/\w|export \w"
)
GROUPS = tuple({command.split()[0] for command in COMMANDS if " " in command})
BIN = Path(sys.executable).parent
# Modules of the product, and of what measures and tests it.
OWN = ("mesh.", "meshbench.", "tests.")


def shell_lines(document: str) -> list[str]:
    """Lines of the document's shell blocks, continuations joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in re.sub(r" *\\\n *", " ", block).splitlines()]


def quoted(document: str) -> list[str]:
    """What stands in backticks outside of blocks."""
    return re.findall(r"`([^`]+)`", prose(document))


def prose(document: str) -> str:
    """The document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)


def links_of(document: str) -> list[tuple[str, str]]:
    """Paths and anchors of the links to other files and within the document; either may be empty."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    return [target.partition("#")[::2] for target in targets if "://" not in target]


def anchors_of(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def modules_run(document: str) -> list[tuple[str, list[str]]]:
    """Modules that the document runs with `python -m`, and what follows their names."""
    lines = [*shell_lines(document), *quoted(document)]
    found = [re.match(r"(?:\.venv/bin/)?python -m ([\w.]+)(.*)", line) for line in lines]
    return [(line[1], shlex.split(line[2])) for line in found if line]


def options_of_module(module: str) -> set[str]:
    """Options of the command that `python -m MODULE` runs; none if it has no click command."""
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    main = getattr(importlib.import_module(f"{module}.__main__" if is_package else module), "main", None)
    return {opt for param in main.params for opt in param.opts} if isinstance(main, click.Command) else set()


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run([*command.split(), "--help"]) == 0
    return capsys.readouterr().out


def mesh_lines(document: str) -> list[list[str]]:
    lines = [*shell_lines(document), *quoted(document)]
    # Made by `make`, which gives it these options.
    served = [re.sub(r'^make serve ARGS="(.*)"$', r"mesh serve \1", line) for line in lines]
    return [shlex.split(line) for line in served if line.startswith("mesh ") and "COMMAND" not in line]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_mesh_command_and_its_flags_exist(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _, *words in mesh_lines(document):
        num_words = 2 if words[0] in GROUPS else 1
        command, arguments = " ".join(words[:num_words]), words[num_words:]
        assert command in COMMANDS
        if command == "agent":
            # What follows the agent's name is its own.
            arguments = list(itertools.takewhile(lambda word: word not in AGENTS, arguments))
        known = help_of(command, capsys)
        for flag in (argument for argument in arguments if argument.startswith("-")):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", known), f"mesh {command} has no {flag}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_flag_in_the_text_exists(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = "".join(help_of(command, capsys) for command in ("", *COMMANDS))
    modules = {module for module, _ in modules_run(document) if module.startswith(OWN)}
    known += " ".join(opt for module in sorted(modules) for opt in options_of_module(module))
    flags = [word for text in quoted(document) for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)]
    assert [flag for flag in flags if flag != "--help" and flag not in known] == []


def test_the_tables_are_made_from_the_commands() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert page.count("<!-- end -->") == 3
    assert rewritten(page) == page, "run: python -m mesh.cli.reference docs/commands.md"
    assert all(f"`mesh {command}" in page for command in COMMANDS)
    # It would notice.
    assert rewritten(page.replace("| `--port` |", "| `--prot` |")) == page


def test_the_table_of_serve_options_tells_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    known = " ".join(help_of("serve", capsys).split())
    page = (ROOT / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| (`--[^|]+) \|[^|]+\| ([^|]*) \|$", page, re.MULTILINE)
    assert len(rows) >= 10
    for flags, default in rows:
        names = re.findall(r"`(--[a-z-]+)`", flags)
        values = default.split(", ") if len(names) > 1 else [default]
        for name, value in zip(names, values, strict=False):
            shown = re.search(rf"{name} .*?(?= --|$)", known)
            assert shown, f"mesh serve has no {name}"
            told = re.search(r"\[default: ([^];]+)", shown[0])
            if told:
                assert value.strip("`") == told[1].strip(), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_files_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    assert [path for path, _ in links_of(document) if not (folder / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_anchors_of_links_exist(document: str) -> None:
    folder = (ROOT / document).parent
    for path, anchor in links_of(document):
        if anchor:
            page = folder / path if path else ROOT / document
            assert anchor in anchors_of(page.read_text()), f"{page.name} has no heading #{anchor}"


def test_every_page_is_named_in_the_readme() -> None:
    assert set(PAGES) <= {path for path, _ in links_of("README.md")}
    assert len(PAGES) >= 8


@pytest.mark.parametrize(
    ("document", "most_lines"),
    [("README.md", 200), *((page, 150 if page == "docs/architecture.md" else 350) for page in PAGES)],
)
def test_documents_stay_short(document: str, most_lines: int) -> None:
    assert len((ROOT / document).read_text().splitlines()) <= most_lines


@pytest.mark.parametrize("document", sorted(set(DOCUMENTS) - set(WITHOUT_PATHS)))
def test_every_file_named_in_the_text_exists(document: str) -> None:
    rooms = r"(?:docs|examples|mesh|meshbench|proto|speculative|stages|tests)/[\w./-]+"
    named = [text for text in quoted(document) if re.fullmatch(rooms, text)]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_shell_line_is_of_a_kind_that_is_checked(document: str) -> None:
    assert [line for line in shell_lines(document) if not SHELL_LINE.match(line)] == []
    kinds = re.findall(r"^```(\w*)\n.*?^```$", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    assert set(kinds) <= {"sh", "text", "toml"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_module_that_is_run_exists_and_has_the_options(document: str) -> None:
    for module, arguments in modules_run(document):
        assert importlib.util.find_spec(module), module
        flags = {argument for argument in arguments if argument.startswith("-")}
        if module.startswith(OWN):
            assert flags <= options_of_module(module), module


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_tool_and_example_that_is_run_exists(document: str) -> None:
    for line in shell_lines(document):
        assert [
            tool for tool in re.findall(r"\.venv/bin/(\w[\w-]*)", line) if not (BIN / tool).exists()
        ] == []
        assert [
            path for path in re.findall(r"^python (examples/\S+)", line) if not (ROOT / path).is_file()
        ] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_exists(document: str) -> None:
    for line in [*shell_lines(document), *quoted(document)]:
        if re.fullmatch(r"make [\w-]+( BACKEND=\w+)?", line):
            done = subprocess.run(
                ["make", "-n", *line.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr


def test_make_test_checks_and_tests() -> None:
    steps = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert all(tool in steps for tool in ("/pytest", "/ruff check", "/ruff format", "/mypy", "/lint-imports"))


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == SOFTWARE_VERSION


def told(command: str, *, document: str = "README.md") -> list[str]:
    """A line of the document that begins so, ready to be run here."""
    line = next(line for line in shell_lines(document) if line.startswith(command))
    program, *arguments = shlex.split(line)
    return [str(BIN / program), *arguments]


@pytest.fixture
def folder(tmp_path: Path, smollm2_path: Path) -> Path:
    """Where a user has put a `model.gguf`; its layers are as many as the documents' cuts need."""
    write_short(smollm2_path, 16, tmp_path / "model.gguf")
    return tmp_path


@pytest.mark.model
@pytest.mark.parametrize(
    ("document", "command", "says"),
    [
        ("docs/exactness.md", "mesh certify", "15"),
        ("examples/three_hosts.md", "mesh certify", "10"),
        ("examples/three_hosts.md", "mesh slice", ""),
        ("docs/speculation.md", "mesh draft make", "draft.gguf"),
    ],
)
def test_model_commands_run_as_told(document: str, command: str, says: str, folder: Path) -> None:
    done = subprocess.run(
        told(command, document=document), cwd=folder, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    if ROOT / document == THREE_HOSTS:
        (step,) = [step for step in steps_of(THREE_HOSTS) if step.command.startswith(command)]
        assert differences(step.recorded, done.stdout) == []
    if command == "mesh slice":
        assert (folder / "share.gguf").read_bytes()[:4] == b"GGUF"
    if command == "mesh draft make":
        assert (folder / "draft.gguf").read_bytes()[:4] == b"GGUF"


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_drafter_is_tuned_in_one_command_as_told(
    smollm2_path: Path, stage_cache_dir: Path, tmp_path: Path
) -> None:
    """With few and short answers: as many as can be split into those to be learned and the others.

    The answer that is measured only is recorded already, as for a second drafter of the same model.
    """
    (tmp_path / "model.gguf").symlink_to(smollm2_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def done(command: str, *more: str) -> subprocess.CompletedProcess[str]:
        found = subprocess.run(
            [*told(command, document="docs/speculation.md"), *more],
            cwd=tmp_path,
            env=os.environ | {"XDG_CACHE_HOME": str(stage_cache_dir)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert found.returncode == 0, found.stderr
        return found

    done("mesh draft begin")
    done("python examples/drafter_tuning/prompts.py")
    for name, count in (("sql", 12), ("chat", 1)):
        path = tmp_path / "prompts" / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))
    recorded = tmp_path / "tuned.gguf.recording"
    layers, n_embd = (3, 15, 28), 576
    (recorded / "chat").parent.mkdir()
    create_recording(recorded / "chat", RecordingHeader(recorded_model(smollm2_path), layers))
    prompts = read_prompts("chat", tmp_path / "prompts" / "chat.jsonl", is_raw=False)
    assert isinstance(prompts, list)
    write_conversation(
        conversation_path(recorded / "chat", 0),
        Conversation(
            ConversationInfo(0, 4, "chat", 0.0, prompts[0].name, "", 0.0),
            np.arange(24, dtype=np.int32),
            np.zeros((24, len(layers), n_embd), np.float16),
        ),
    )
    # So little is learned by chance: as good as nothing is, so that the new drafter is as good as before.
    small = ("--max-tokens", "12", "--passes", "1", "--rate", "1e-9", "--vocabulary", "keep", "--json")
    found = json.loads(done("mesh draft tune", *small).stdout)
    assert [section["title"] for section in found["sections"]] == ["sql", "chat"]
    assert (found["learned_prompts"], found["is_rejected"]) == (9, False)
    assert found["sections"][0]["rows"][1]["advice"]
    assert (tmp_path / "tuned.gguf").read_bytes()[:4] == b"GGUF"
    assert {path.name: len(list(path.glob("*.feat"))) for path in recorded.iterdir()} == {
        "sql": 12,
        "chat": 1,
    }
    assert {path.stat().st_mode & 0o777 for path in recorded.iterdir()} == {0o700}


def test_status_without_a_mesh_says_how_to_get_one(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    done = subprocess.run(
        [*told("mesh status"), "--url", url], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "start one with `mesh serve`" in done.stderr
    assert done.stderr.count("\n") == 1


def is_made_by_make() -> bool:
    """Whether `make serve` would start at once: a checkout may have its environment from elsewhere."""
    environment = BIN.parent
    return (
        environment == ROOT / ".venv"
        and subprocess.run(
            ["make", "-q", ".venv/.serving"], cwd=ROOT, capture_output=True, check=False
        ).returncode
        == 0
    )


@dataclass(frozen=True)
class Served:
    url: str
    printed: str
    is_by_make: bool


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, stage_cache_dir: Path) -> Iterator[Served]:
    """The demo, started with `make serve` where make has made the environment, stopped with Ctrl-C."""
    port = free_port("127.0.0.1")
    folder = tmp_path_factory.mktemp("readme")
    options = f"--port {port} --advertise 127.0.0.1"
    is_by_make = is_made_by_make()
    command = (
        ["make", "serve", f"ARGS={options}"] if is_by_make else [str(BIN / "mesh"), "serve", *options.split()]
    )
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=os.environ | {"XDG_CACHE_HOME": str(stage_cache_dir)},
            start_new_session=True,  # a terminal's Ctrl-C goes to make and to what make runs
        )
    try:
        deadline_s = time.monotonic() + 120
        while "Ctrl-C stops it" not in (folder / "out").read_text():
            assert process.poll() is None, (folder / "err").read_text()
            assert time.monotonic() < deadline_s, (folder / "err").read_text()
            time.sleep(0.2)
        yield Served(f"http://127.0.0.1:{port}", (folder / "out").read_text(), is_by_make)
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        os.killpg(process.pid, signal.SIGINT)
        process.wait(120)
    _, left = psutil.wait_procs(family, timeout=10)
    assert left == []


@pytest.mark.cluster
@pytest.mark.sociable
@pytest.mark.model
class TestDemo:
    def test_make_serve_serves(self, served: Served) -> None:
        if not served.is_by_make:
            pytest.skip("this environment was not made by make; the demo was started with `mesh serve`")
        assert "in 2 stages" in served.printed

    def test_the_curl_line_of_the_readme_is_the_one_printed(self, served: Served) -> None:
        printed = re.sub(r" *\\\n *", " ", served.printed)
        (line,) = [line for line in shell_lines("README.md") if line.startswith("curl ")]
        assert line.replace("http://127.0.0.1:8000", served.url) in printed

    def test_the_curl_line_answers(self, served: Served) -> None:
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        (line,) = [line for line in shell_lines("README.md") if line.startswith("curl ")]
        command = shlex.split(line.replace("http://127.0.0.1:8000", served.url))
        done = subprocess.run(
            [*command, "-sS", "--noproxy", "*"], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert '"content":' in done.stdout

    @pytest.mark.parametrize(
        ("example", "says"),
        [("openai_client.py", "finish reason: "), ("stream_usage.py", "proposed tokens accepted")],
    )
    def test_the_examples_run(self, example: str, says: str, served: Served) -> None:
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / example, f"{served.url}/v1", "Say hello."],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert says in done.stdout

    def test_another_model_comes_and_goes_as_told(self, served: Served, tmp_path: Path) -> None:
        TinyModel("gemma3", head_size=32).write(tmp_path / "other.gguf")
        asked = {"model": "other", "prompt": "The sea", "max_tokens": 4}
        for command, says, status in (
            ("mesh load", 'send "model": "other"', 200),
            ("mesh unload", "its memory on the hosts is free", 404),
        ):
            done = subprocess.run(
                [*told(command, document="docs/operating.md"), "--url", served.url],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            assert says in done.stdout
            assert httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60).status_code == status

    def test_status_shows_the_stages(self, served: Served) -> None:
        done = subprocess.run(
            [*told("mesh status"), "--url", served.url], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "30 layers" in done.stdout
