"""What people copy to run a mesh as a service: units that systemd takes, and flags that exist."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh.cli.main import run

EXAMPLES = Path(__file__).parents[3] / "examples"
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
COMPOSE = EXAMPLES / "compose" / "compose.yaml"


def command_of(unit: Path) -> list[str]:
    """What it starts, program and arguments."""
    text = re.sub(r"\\\n\s*", "", unit.read_text())
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    return shlex.split(line)


def require_flags(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([words[0], "--help"]) == 0
    known = capsys.readouterr().out
    flags = [word for word in words if word.startswith("--")]
    assert flags
    for flag in flags:
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", known), f"mesh {words[0]} has no {flag}"


def test_there_is_a_unit_for_the_head_and_one_for_hosts() -> None:
    assert [unit.name for unit in UNITS] == ["mesh-join.service", "mesh-serve.service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_mesh_with_flags_that_exist(unit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = command_of(unit)
    assert program.endswith("/bin/mesh")
    assert words[0] == unit.stem.removeprefix("mesh-")
    require_flags(words, capsys)
    # What the environment file is to hold is told at its top.
    text = unit.read_text()
    for name in set(re.findall(r"\$\{(\w+)\}", text)):
        assert f"{name}=" in text.partition("[Unit]")[0]


def test_what_stages_need_outlives_a_head_that_crashes() -> None:
    """systemd removes a private /tmp whenever the service ends, and Ray's sockets are in there."""
    settings = (EXAMPLES / "systemd" / "mesh-serve.service").read_text().splitlines()
    assert "KillMode=process" in settings
    assert not [line for line in settings if line.startswith("PrivateTmp=")]
    assert "ReadWritePaths=/tmp" in settings


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_systemd_takes_the_unit_as_it_is(unit: Path, tmp_path: Path) -> None:
    # It looks for the program.
    text = unit.read_text().replace(command_of(unit)[0], sys.executable)
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"^EnvironmentFile=", "EnvironmentFile=-", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_a_unit_can_do_little_harm(unit: Path, tmp_path: Path) -> None:
    """By systemd's own measure, from 0.0 for safe to 10.0 for all doors open; a plain service has 9.6."""
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text())
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=25", "--no-pager", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_containers_start_mesh_with_flags_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    assert set(services) == {"head", "beta", "gamma"}
    for service in services.values():
        require_flags(service["command"], capsys)
        assert (COMPOSE.parent / service["build"]["context"]).resolve() == EXAMPLES.parent
        assert (EXAMPLES.parent / service["build"]["dockerfile"]).is_file()
    assert int(services["head"]["command"][3]) == len(services) - 1


def test_the_image_is_made_by_targets_that_exist() -> None:
    recipe = (COMPOSE.parent / "Dockerfile").read_text()
    (target,) = re.findall(r"^RUN make (\S+)$", recipe, re.MULTILINE)
    done = subprocess.run(
        ["make", "-n", target], cwd=EXAMPLES.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0,
    reason="docker compose is missing",
)
def test_docker_compose_takes_the_file_as_it_is() -> None:
    done = subprocess.run(
        ["docker", "compose", "-f", str(COMPOSE), "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
