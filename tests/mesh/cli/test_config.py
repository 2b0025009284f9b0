"""Options from flags, environment and file: which counts, and what is refused."""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.cli.config_file import (
    ConfigFile,
    find_config,
    is_on_own_machine,
    keys_of,
    nearest,
    settings_for,
    variable_of,
)
from mesh.cli.main import command_named, configurable_commands, run
from mesh.cli.options import OptionsCommand
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
            assert find_config(None, environment, tmp_path) == ConfigFile(own, is_chosen=True)
    assert find_config(None, environment, tmp_path) == ConfigFile(here, is_chosen=False)
    # The user's own is so in its folder as well.
    assert find_config(None, environment, own.parent) == ConfigFile(own, is_chosen=True)
    environment["MESH_CONFIG"] = str(named)
    assert find_config(None, environment, tmp_path) == ConfigFile(named, is_chosen=True)
    assert find_config(other, environment, tmp_path) == ConfigFile(other, is_chosen=True)
    assert find_config(here, environment, tmp_path) == ConfigFile(here, is_chosen=True)
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
    rare = command.rare if isinstance(command, OptionsCommand) else []
    # Each that is given by --set has its own key.
    assert len(keys) == len(command.params) + len(rare) - bool(rare)
    assert settings_for(name, command, {}, None, {}) == {}
    assert all(key == key.lower() and "_" not in key for key in keys)


CLIENTS = tuple(name for name in configurable_commands() if "url" in keys_of(command_named(name)))
ELSEWHERE = "http://mesh.example:8000"


def test_clients_are_known() -> None:
    assert {"agent", "chat", "status", "top", "load", "unload", "drain", "evict", "plan", "doctor"} == set(
        CLIENTS
    )


@pytest.mark.parametrize("name", CLIENTS)
def test_a_file_that_lies_in_the_working_folder_chooses_neither_server_nor_key(
    name: str, tmp_path: Path
) -> None:
    path, command = tmp_path / "mesh.toml", command_named(name)
    for key, value in (("url", ELSEWHERE), ("api-key-file", "key")):
        param = keys_of(command)[key].name
        assert param is not None

        def setting(
            *, is_chosen: bool, environment: dict[str, str], table: dict[str, str], param: str = param
        ) -> object:
            found = settings_for(name, command, table, ConfigFile(path, is_chosen), environment)
            return found[param].value

        table = {key: value}
        refuse = setting(is_chosen=False, environment={}, table=table)
        assert callable(refuse)
        with pytest.raises(ClusterError) as refused:
            refuse()
        assert str(path) in refused.value.message
        assert f"mesh --config {path} {name}" in refused.value.message
        # One that was chosen may, and so may the environment.
        chosen = setting(is_chosen=True, environment={}, table=table)
        assert chosen == (value if key == "url" else str(tmp_path / "key"))
        variable = {variable_of(name, key): "http://other.example"}
        assert setting(is_chosen=False, environment=variable, table=table) == "http://other.example"
    (own_machine,) = settings_for(
        name, command, {"url": "http://127.0.0.1:9000"}, ConfigFile(path, is_chosen=False), {}
    ).values()
    assert own_machine.value == "http://127.0.0.1:9000"


def test_the_key_is_not_sent_where_a_file_in_the_working_folder_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESH_API_KEY", "sk-secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        # Other names of this machine are not taken for it.
        (tmp_path / "mesh.toml").write_text(
            "".join(f'[{name}]\nurl = "http://127.1:{port}"\n' for name in ("status", "agent"))
        )
        for arguments in (["status"], ["agent", "--show", "codex"]):
            assert run(arguments) == 1
            said = capsys.readouterr().err
            assert f"{tmp_path / 'mesh.toml'} would send prompts and API key" in said
            assert "sk-secret" not in said
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    # The command line has precedence, and help is there all the same.
    assert run(["status", "--url", "http://127.0.0.1:1"]) == 1
    assert "no mesh answers at http://127.0.0.1:1/" in capsys.readouterr().err
    assert run(["status", "--help"]) == 0
    # Whoever names the file means it.
    capsys.readouterr()
    assert run(["--config", "mesh.toml", "status"]) == 1
    assert f"no mesh answers at http://127.1:{port}/" in capsys.readouterr().err


def test_what_may_not_be_set_is_not_shown_as_set(show: Show, tmp_path: Path) -> None:
    own = tmp_path / "home" / "spanmesh" / "mesh.toml"
    own.parent.mkdir(parents=True)
    own.write_text(f'[status]\nurl = "{ELSEWHERE}"\napi-key-file = "key"\n')
    code, lines, _ = show("status")
    assert code == 0
    assert lines["url"].startswith(f'"{ELSEWHERE}"')
    assert lines["api-key-file"].startswith(f'"{own.with_name("key")}"')
    (tmp_path / "mesh.toml").write_text(own.read_text())
    code, _, errors = show("status")
    assert code == 1
    assert "a mesh.toml that was only found in the working folder may not" in errors
    # The server's own key file is another matter.
    (tmp_path / "mesh.toml").write_text('[serve]\napi-key-file = "keys"\n')
    _, lines, _ = show("serve")
    assert lines["api-key-file"].startswith(f'"{tmp_path / "keys"}"')


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1", "http://127.8.9.10:1/", "https://localhost:8000/v1", "http://[::1]:8000/a-b/~c_d"],
)
def test_addresses_of_this_machine(url: str) -> None:
    assert is_on_own_machine(url)


@pytest.mark.parametrize(
    "url",
    [
        ELSEWHERE,
        "",
        "127.0.0.1:8000",
        "//127.0.0.1",
        "ftp://127.0.0.1",
        "http://0.0.0.0:8000",
        "http://127.1",
        "http://127.300.0.1",
        "http://2130706433",
        "http://[::2]",
        "http://localhost.mesh.example",
        "http://127.0.0.1.mesh.example",
        "http://[::1].mesh.example",
        "http://127.0.0.1@mesh.example",
        "http://127.0.0.1:80@mesh.example/",
        "http://mesh.example@127.0.0.1",
        "http://mesh.example\\@127.0.0.1",
        "http://127.0.0.1\\@mesh.example",
        "http://mesh.example#@127.0.0.1",
        "http://127.0.0.1?@mesh.example",
        "http://127.0.0.1#@mesh.example",
        "http://127.0.0.1\t.mesh.example",
        "http://127.0.0.1\n",
        " http://127.0.0.1",
        "http://127.0.0.\u0661",
    ],
)
def test_what_may_be_another_machine(url: str) -> None:
    assert not is_on_own_machine(url)


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
