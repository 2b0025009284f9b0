"""The file of API keys and the command that edits it."""

import datetime as dt
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.api_keys import (
    ApiKeys,
    KeyRecord,
    add_key,
    check_key_name,
    digest_of,
    format_key_line,
    parse_key_line,
    read_key_file,
    remove_key,
)
from mesh.cli.main import run
from mesh.tuning.tuned_folder import TunedDrafter, TunedFolder
from spanmesh_proto.errors import MeshError
from tests.support.recordings import write_recording
from tests.support.tiny_models import TinyModel

LIMITS = st.none() | st.integers(1, 10**12)
MOMENTS = st.none() | st.integers(0, 2**33).map(lambda seconds: dt.datetime.fromtimestamp(seconds, dt.UTC))


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True),
    digest=st.binary(min_size=32, max_size=32),
    requests=LIMITS,
    tokens=LIMITS,
    expires=MOMENTS,
    concurrent=LIMITS,
    may_load=st.booleans(),
    may_record=st.booleans(),
    group=st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True),
)
def test_a_key_is_read_as_it_was_written(
    name: str,
    digest: bytes,
    requests: int | None,
    tokens: int | None,
    expires: dt.datetime | None,
    concurrent: int | None,
    *,
    may_load: bool,
    may_record: bool,
    group: str | None,
) -> None:
    check_key_name(name)
    record = KeyRecord(
        name,
        digest,
        requests,
        tokens,
        expires,
        max_concurrent=concurrent,
        may_load=may_load,
        may_record=may_record,
        group=group,
    )
    assert parse_key_line(format_key_line(record)) == record


@given(line=st.text(max_size=200))
def test_any_line_is_a_key_or_an_error_of_ours(line: str) -> None:
    said = ""
    try:
        parse_key_line(line)
    except MeshError as error:
        said = error.message
    assert not any(word in said for word in line.split() if len(word) > 8)


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("sha256:00", "64 lower-case hexadecimal digits"),
        (f"sha256:{'0' * 64} tokens-per-minute=0", "not a number from 1"),
        (f"sha256:{'0' * 64} tokens-per-minute=1e9", "not a number from 1"),
        (f"sha256:{'0' * 64} concurrent=0", "not a number from 1"),
        (f"sha256:{'0' * 64} expires=tomorrow", "not a date such as"),
        (f"sha256:{'0' * 64} may-load=1", "neither yes nor no"),
        (f"sha256:{'0' * 64} may-record=maybe", "neither yes nor no"),
        (f"sha256:{'0' * 64} may-record=yes group=", "has a group that is no name"),
        (f"sha256:{'0' * 64} group=a/b", "has a group that is no name"),
        (f"sha256:{'0' * 64} colour=red", "unknown setting"),
        (f"sha256:{'0' * 64} expires=2030-01-01 expires=2030-01-01", "has a setting twice"),
        ("neither this", "is not `NAME"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, rest: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# comment\nalice {rest}\n")
    with pytest.raises(MeshError, match=f"line 2 of the API key file.*{reason}"):
        read_key_file(path)


def test_the_command_makes_lists_and_removes_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "spanmesh" / "api-keys"
    assert run(["keys", "add", "alice", "--tokens-per-minute", "500", "--expires", "30d"]) == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("sk-mesh-")
    assert path.stat().st_mode & 0o777 == 0o600
    assert key not in path.read_text()
    assert run(["keys", "add", "bob", "--concurrent", "9"]) == 0
    assert capsys.readouterr().out.strip() != key

    found = ApiKeys.from_file(path).find(key)
    assert found is not None
    assert (found.name, found.tokens_per_minute, found.requests_per_minute) == ("alice", 500, None)
    assert found.expires_at is not None
    left = found.expires_at - dt.datetime.now(dt.UTC)
    assert dt.timedelta(days=29) < left <= dt.timedelta(days=30)

    assert run(["keys", "list"]) == 0
    shown = capsys.readouterr().out
    assert ["all slots but one" in line for line in shown.splitlines() if "alice" in line] == [True]
    assert [line.replace("│", " ").split()[-2] for line in shown.splitlines() if "bob" in line] == ["9"]
    assert [line.split()[1] for line in shown.splitlines() if "no limit" in line] == ["alice", "bob"]
    assert key not in shown
    assert "may load" not in shown
    assert run(["keys", "add", "carol", "--may-load"]) == 0
    capsys.readouterr()
    assert [record.may_load for record in read_key_file(path)] == [False, False, True]
    assert run(["keys", "list"]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert {row[0]: row[-1] for row in rows if row and row[0] in {"alice", "carol"}} == {
        "alice": "no",
        "carol": "yes",
    }
    assert "may record" not in " ".join(map(" ".join, rows))
    assert run(["keys", "add", "dora", "--may-record"]) == 0
    assert [record.may_record for record in read_key_file(path)] == [False, False, False, True]
    capsys.readouterr()
    assert run(["keys", "list"]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert {row[0]: row[-2:] for row in rows if row and row[0] in {"alice", "carol", "dora"}} == {
        "alice": ["no", "no"],
        "carol": ["yes", "no"],
        "dora": ["no", "yes"],
    }
    assert run(["keys", "rm", "dora", "--recording", str(tmp_path)]) == 1
    assert "is no recording" in capsys.readouterr().err
    # The name is needed to try again.
    assert run(["keys", "rm", "dora"]) == 0
    assert run(["keys", "rm", "carol"]) == 0
    assert run(["keys", "rm", "alice"]) == 0
    assert [record.name for record in read_key_file(path)] == ["bob"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["add", "alice"], 1, "has a key alice already"),
        (["add", "no name"], 1, "cannot be a key's name"),
        (["add", "#alice"], 1, "cannot be a key's name"),
        (["add", "bob", "--expires", "soon"], 2, "not a duration such as 12h"),
        (["add", "bob", "--expires", "2001-01-01"], 2, "is in the past"),
        (["add", "bob", "--tokens-per-minute", "0"], 2, "--tokens-per-minute"),
        (["add", "bob", "--concurrent", "0"], 2, "--concurrent"),
        (["rm", "bob"], 1, "has no key bob"),
    ],
)
def test_what_cannot_be_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice sha256:{'0' * 64}")
    assert run(["keys", *arguments, "--api-key-file", str(path)]) == code
    assert says in capsys.readouterr().err
    assert path.read_text() == f"alice sha256:{'0' * 64}"


def test_other_lines_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\n\nplain open-sesame\nnameless-key-of-old")
    add_key(path, KeyRecord("alice", digest_of("a")))
    add_key(path, KeyRecord("bob", digest_of("b")))
    remove_key(path, "alice")
    lines = path.read_text().splitlines()
    assert lines[:4] == ["# mine", "", "plain open-sesame", "nameless-key-of-old"]
    assert [record.name for record in read_key_file(path)] == ["plain", "key-68b17e020bcc", "bob"]


def test_two_who_edit_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def add(part: int) -> None:
        for number in range(5):
            add_key(path, KeyRecord(f"key-{part}-{number}", digest_of(f"{part} {number}")))

    threads = [threading.Thread(target=add, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_key_file(path)) == 20


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "keys", tmp_path / "link"
    link.symlink_to(path)
    add_key(link, KeyRecord("alice", digest_of("a")))
    assert link.is_symlink()
    assert [record.name for record in read_key_file(path)] == ["alice"]


def test_changes_count_at_once_and_a_lost_file_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, KeyRecord("alice", digest_of("of alice")))
    keys = ApiKeys.from_file(path)
    assert keys.find("of alice") is not None
    add_key(path, KeyRecord("bob", digest_of("of bob")))
    assert keys.find("of bob") is not None
    remove_key(path, "alice")
    assert keys.find("of alice") is None
    remove_key(path, "bob")
    assert keys.find("of bob") is None
    path.write_text("one two three\n")
    assert keys.find("three") is None
    path.write_text("carol of-carol\n")
    assert keys.find("of-carol") is not None
    path.unlink()
    assert keys.find("of-carol") is None


def test_a_hash_is_no_key_for_a_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    add_key(path, KeyRecord("alice", digest_of("of alice")))
    assert run(["status", "--api-key-file", str(path)]) == 1
    assert "MESH_API_KEY" in capsys.readouterr().err


def test_a_group_is_of_keys_that_may_be_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    where = ["--api-key-file", str(tmp_path / "keys")]
    assert run(["keys", "add", "alice", "--group", "staff", *where]) == 1
    assert (
        "--group staff is for keys whose answers may be recorded: add --may-record" in capsys.readouterr().err
    )
    assert run(["keys", "add", "alice", "--may-record", "--group", "a b", *where]) == 1
    assert "'a b' cannot be a group's name" in capsys.readouterr().err
    assert run(["keys", "add", "alice", "--may-record", "--group", "staff", *where]) == 0
    assert run(["keys", "add", "bob", *where]) == 0
    capsys.readouterr()
    assert run(["keys", "list", *where]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: row[-2:] for row in rows if row and row[0] in {"alice", "bob"}}
    assert found == {"alice": ["yes", "staff"], "bob": ["no", "no"]}


def test_with_a_key_go_drafters_that_learned_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--api-key-file", str(tmp_path / "keys")]
    for name in ("alice", "bob"):
        assert run(["keys", "add", name, "--may-record", "--group", "staff", *where]) == 0
    digests = {record.name: record.digest.hex() for record in read_key_file(tmp_path / "keys")}
    target = TinyModel("llama").write(tmp_path / "tiny.gguf")
    folder = write_recording(tmp_path / "of", target, [])
    tuned = TunedFolder(folder)
    for number, keys in enumerate([("alice",), ("alice", "bob")], 1):
        tuned.write(TunedDrafter(number, "", 0, "staff", tuple(digests[key] for key in keys), 0.0))
    assert run(["keys", "rm", "bob", "--recording", str(folder), *where]) == 0
    assert "0 recorded answers and 1 drafters were erased" in capsys.readouterr().err
    assert [drafter.number for drafter in tuned.drafters()] == [1]
