"""Options from flags, environment and file: which counts, and what is refused."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.cli.config_file import find_config, keys_of, nearest, settings_for
from mesh.cli.main import command_named, configurable_commands, run
from mesh.placement.topology import read_topology
from spanmesh_proto.errors import ClusterError

Show = Callable[..., tuple[int, dict[str, str], str]]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("MESH_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    def shown(*arguments: str, before: tuple[str, ...] = ()) -> tuple[int, dict[str, str], str]:
        """Exit code, by key the rest of its line, and standard error."""
        code = run([*before, "config", "show", "--origin", *arguments])
        said = capsys.readouterr()
        lines = [line.removeprefix("# ").split(" =", 1) for line in said.out.splitlines() if " =" in line]
        return code, {key: rest.strip() for key, rest in lines}, said.err

    return shown


def test_flag_before_environment_before_file_before_default(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mesh.toml").write_text("[serve]\nport = 9001\nparallel = 2\nctx-size = 512\n")
    monkeypatch.setenv("MESH_SERVE_PORT", "9002")
    monkeypatch.setenv("MESH_SERVE_PARALLEL", "3")
    code, lines, _ = show("serve", "--port", "9003")
    assert code == 0
    assert lines["port"] == "9003  # flag"
    assert lines["parallel"] == "3  # environment MESH_SERVE_PARALLEL"
    assert lines["ctx-size"] == f"512  # file {tmp_path / 'mesh.toml'}"
    assert lines["max-waiting"] == "64  # default"
    assert lines["threads"].endswith("# default")


def test_what_is_shown_can_be_read_again(
    show: Show, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
        [serve]
        model = "model.gguf"
        split = [10, 20]
        cors-origin = ["http://a.example", "http://b.example"]
        exact = true
        no-spec-cancel = true
        memory = "8G"
        [join]
        threads = 2
    """
    (tmp_path / "mesh.toml").write_text(text)
    assert run(["config", "show"]) == 0
    printed = capsys.readouterr().out
    told = tomllib.loads(printed)
    assert told["serve"]["model"] == str(tmp_path / "model.gguf")
    assert told["serve"]["split"] == [10, 20]
    assert told["serve"]["cors-origin"] == ["http://a.example", "http://b.example"]
    assert (told["serve"]["exact"], told["serve"]["no-spec-cancel"]) == (True, True)
    assert told["serve"]["memory"] == 8 * 2**30
    assert told["join"]["threads"] == 2
    (tmp_path / "mesh.toml").write_text(printed)
    assert run(["config", "show"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[serve]\nprot = 1", "[serve] has no 'prot'; did you mean port?"),
        ("[srve]\nport = 1", "no command [srve] has options here; did you mean serve?"),
        ("[keys]\nport = 1", "no command [keys]"),
        ("port = 1", "no command [port]"),
        ("serve = 1", "serve must be a table"),
        ('[serve]\nport = "many"', "port by file"),
        ("[serve]\nport = 70000", "port by file"),
        ("[serve]\nport = true", "True is not a text or a number"),
        ('[serve]\nexact = "yes"', "'yes' is not true or false"),
        ("[serve\n", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_reason(show: Show, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mesh.toml").write_text(text)
    code, _, errors = show()
    assert code == 1
    assert says in errors
    assert errors.count("\n") == 1


def test_serve_and_join_themselves_refuse_it_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mesh.toml").write_text("[serve]\nprot = 1\n[join]\nthread = 1\n")
    for command, says in (("serve", "did you mean port?"), ("join", "did you mean threads?")):
        assert run([command]) == 1
        assert says in capsys.readouterr().err
    (tmp_path / "mesh.toml").unlink()
    monkeypatch.setenv("MESH_JOIN_THREDS", "1")
    assert run(["join", "token"]) == 1
    assert "MESH_JOIN_THREDS, which `mesh join` does not know; did you mean MESH_JOIN_THREADS?" in (
        capsys.readouterr().err
    )


def test_a_token_from_the_environment_is_used_and_never_shown(
    show: Show, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESH_JOIN_TOKEN", "rubbish-that-nobody-may-see")
    _, lines, _ = show("join")
    assert lines["token"] == '"…"  # environment MESH_JOIN_TOKEN'
    assert run(["join"]) == 1
    assert "is not a join token" in capsys.readouterr().err


def test_a_command_is_shown_without_what_it_must_be_given(show: Show, tmp_path: Path) -> None:
    (tmp_path / "mesh.toml").write_text("[plan]\nparallel = 2\n")
    code, lines, errors = show("plan")
    assert code == 0, errors
    assert lines["parallel"].startswith("2")
    code, _, errors = show("models")
    assert code == 2
    assert "no command 'models' has options here" in errors


def test_switches_in_the_environment(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_SERVE_EXACT", "yes")
    monkeypatch.setenv("MESH_SERVE_CORS_ORIGIN", "http://a.example, http://b.example")
    _, lines, _ = show("serve")
    assert lines["exact"].startswith("true ")
    assert lines["cors-origin"].startswith('["http://a.example", "http://b.example"]')
    monkeypatch.setenv("MESH_SERVE_EXACT", "perhaps")
    code, _, errors = show("serve")
    assert code == 1
    assert "exact by environment MESH_SERVE_EXACT: 'perhaps' is not true or false" in errors


def test_the_file_is_the_one_named_then_the_one_here_then_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "home" / "spanmesh" / "mesh.toml"
    here, named, other = (tmp_path / name for name in ("mesh.toml", "named.toml", "other.toml"))
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "home"), "MESH_CONFIG": ""}
    assert find_config(None, environment, tmp_path) is None
    own.parent.mkdir(parents=True)
    for path in (own, here, named, other):
        path.touch()
        if path is own:
            assert find_config(None, environment, tmp_path) == own
    assert find_config(None, environment, tmp_path) == here
    environment["MESH_CONFIG"] = str(named)
    assert find_config(None, environment, tmp_path) == named
    assert find_config(other, environment, tmp_path) == other
    with pytest.raises(ClusterError, match=r"none\.toml, named by --config, is not a file"):
        find_config(tmp_path / "none.toml", environment, tmp_path)


def test_a_file_named_by_the_flag_is_read(show: Show, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("[serve]\nport = 9001\n")
    _, lines, _ = show("serve", before=("--config", "other.toml"))
    assert lines["port"].startswith("9001")


@pytest.mark.parametrize("name", configurable_commands())
def test_every_option_of_every_command_has_one_key_and_accepts_its_default(name: str) -> None:
    command = command_named(name)
    keys = keys_of(command)
    assert len(keys) == len(command.params)
    assert settings_for(name, command, {}, None, {}) == {}
    assert all(key == key.lower() and "_" not in key for key in keys)


def test_far_words_get_the_whole_list() -> None:
    assert nearest("zzzz", ["port", "host"]) == "; there are host, port"


def test_the_documents_files_are_understood(tmp_path: Path, show: Show) -> None:
    root = Path(__file__).parents[3]
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    texts = [path.read_text() for path in pages]
    blocks = [
        block
        for text in texts
        for block in re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]
    assert len(blocks) == 2
    (locked,) = [block for block in blocks if block.startswith("[[stage]]")]
    (options,) = [block for block in blocks if block.startswith("[serve]")]
    path = tmp_path / "topology.toml"
    path.write_text(locked)
    assert read_topology(path).hosts == ("alpha", "beta")
    (tmp_path / "mesh.toml").write_text(options)
    code, lines, _ = show("serve")
    assert code == 0
    assert lines["wait-for"].startswith("2  # file ")
