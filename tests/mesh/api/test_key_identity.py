"""What belongs to an API key goes by its hash: neither its line nor its name hands that to another key."""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mesh.api.api_keys import ApiKeys, KeyRecord, add_key, digest_of, own_name, read_key_file, remove_key
from mesh.api.response_store import ResponseStore, StoredResponse
from mesh.cli.main import run
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import MeshError
from tests.support import api_harness
from tests.support.api_harness import MODEL, ScriptedEngine, running_api
from tests.support.ring_api import CHAT, RingApi, running_ring_api

tokenizer = api_harness.tokenizer

ALICE, BOB = "alice-secret", "bob-secret"
PROMPT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me about the sea, and then about the mountains."}],
    "max_tokens": 2,
}


def bearer(key: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"}


def found(keys: ApiKeys, key: str) -> KeyRecord:
    record = keys.find(key)
    assert record is not None
    return record


def test_a_key_without_a_name_is_called_by_its_hash_whatever_line_it_is_in(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{ALICE}\n{BOB}\n")
    keys = ApiKeys.from_file(path)
    bob = found(keys, BOB)
    assert bob.name == f"key-{hashlib.sha256(BOB.encode()).hexdigest()[:12]}"
    removed = remove_key(path, found(keys, ALICE).name)
    assert removed == own_name(digest_of(ALICE))
    assert keys.find(ALICE) is None
    assert found(keys, BOB) == bob
    # It keeps both where it is given a name, or another file, too.
    path.write_text(f"# more\n\nbob {BOB}\n")
    assert (found(keys, BOB).name, found(keys, BOB).identity) == ("bob", bob.identity)


def test_the_command_takes_as_many_digits_as_tell_a_key_from_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The hashes of these two begin alike.
    alike = [f"key-number-{number}" for number in range(400)]
    digits = [digest_of(key).hex()[:3] for key in alike]
    first, second = next(
        (alike[digits.index(each)], alike[index])
        for index, each in enumerate(digits)
        if digits.index(each) < index
    )
    path = tmp_path / "keys"
    path.write_text(f"{first}\nkey-1 named\n{second}\n")
    where = ["--api-key-file", str(path)]
    shared, own = f"key-{digest_of(first).hex()[:3]}", own_name(digest_of(first))
    for name, says in (
        (shared, f"is ambiguous: it matches {own}, {own_name(digest_of(second))}"),
        ("key-", "has no key key-"),
        (f"{own}0", f"has no key {own}0"),
        ("key-3", "has no key key-3"),
    ):
        assert run(["keys", "rm", name, *where]) == 1
        assert says in capsys.readouterr().err
    assert run(["keys", "list", *where]) == 0
    assert own in capsys.readouterr().out
    assert run(["keys", "rm", own[:-4], *where]) == 0
    assert f"the key {own} was removed" in capsys.readouterr().err
    assert path.read_text() == f"key-1 named\n{second}\n"
    assert run(["keys", "rm", "key-1", *where]) == 0
    assert [record.name for record in read_key_file(path)] == [own_name(digest_of(second))]


def test_hashes_that_begin_alike_have_longer_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {ALICE: bytes(31) + b"\x01", BOB: bytes(31) + b"\x10", "carol": b"\x01" * 32}
    monkeypatch.setattr("mesh.api.api_keys.digest_of", digests.__getitem__)
    path = tmp_path / "keys"
    path.write_text(f"{ALICE}\n{BOB}\ncarol\n")
    names = [record.name for record in read_key_file(path)]
    assert names == [f"key-{'0' * 63}", f"key-{'0' * 62}1", f"key-{'01' * 6}"]
    remove_key(path, names[1])
    assert path.read_text() == f"{ALICE}\ncarol\n"


def test_a_key_that_a_file_has_twice_is_one_and_goes_as_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{ALICE}\n{BOB}\n{ALICE}\n")
    alice, bob = read_key_file(path)
    assert remove_key(path, alice.name) == alice.name
    assert path.read_text() == f"{BOB}\n"
    path.write_text(f"{BOB}\n{bob.name} another\n")
    with pytest.raises(MeshError, match=f"line 2 .* names {bob.name} a second time"):
        read_key_file(path)


async def ask(running: RingApi, key: str) -> int:
    """Ask the same as ever; gives how much of it was cached."""
    response = await running.api.http.post(CHAT, json=PROMPT, headers=bearer(key))
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.model
async def test_a_name_that_is_given_again_inherits_no_caches(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, KeyRecord("team", digest_of(ALICE)))
    add_key(path, KeyRecord("other", digest_of("of another")))
    async with running_ring_api(tokenizer, keys=ApiKeys.from_file(path)) as running:
        assert await ask(running, ALICE) == 0
        assert await ask(running, ALICE) > 0
        remove_key(path, "team")
        add_key(path, KeyRecord("team", digest_of(BOB)))
        assert await ask(running, BOB) == 0
        assert await ask(running, BOB) > 0


@pytest.mark.model
async def test_a_key_that_comes_back_finds_nothing_of_before(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    both, one = f"alice {ALICE}\nbob {BOB}\n", f"bob {BOB}\n"
    path.write_text(both)
    async with running_ring_api(tokenizer, keys=ApiKeys.from_file(path)) as running:
        assert await ask(running, ALICE) == 0
        assert await ask(running, BOB) == 0
        path.write_text(one)
        assert await ask(running, BOB) > 0
        path.write_text(both)
        assert await ask(running, ALICE) == 0
        assert await ask(running, ALICE) > 0


@pytest.mark.model
async def test_lines_that_move_up_inherit_no_caches(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{ALICE}\n{BOB}\n")
    async with running_ring_api(tokenizer, keys=ApiKeys.from_file(path)) as running:
        assert await ask(running, ALICE) == 0
        path.write_text(f"{BOB}\n")
        assert await ask(running, BOB) == 0


@pytest.mark.model
async def test_a_name_that_is_given_again_inherits_neither_answers_nor_limits(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    add_key(path, KeyRecord("other", digest_of("of another")))
    add_key(path, KeyRecord("team", digest_of(ALICE), requests_per_minute=2))
    engine = ScriptedEngine([(300,)])
    keys = ApiKeys.from_file(path)
    async with running_api(engine, tokenizer, keys=keys, steady_s=lambda: 0.0) as api:
        made = await api.http.post(
            "/v1/responses", json={"model": MODEL, "input": "x"}, headers=bearer(ALICE)
        )
        where = f"/v1/responses/{made.json()['id']}"
        assert (await api.http.get(where, headers=bearer(ALICE))).status_code == 200
        assert (await api.http.get(where, headers=bearer(ALICE))).status_code == 429
        remove_key(path, "team")
        add_key(path, KeyRecord("team", digest_of(BOB), requests_per_minute=2))
        for status in (404, 404, 429):
            assert (await api.http.get(where, headers=bearer(BOB))).status_code == status
        # The key itself comes back: what it had is gone for good.
        remove_key(path, "team")
        add_key(path, KeyRecord("team", digest_of(ALICE), requests_per_minute=2))
        assert (await api.http.get(where, headers=bearer(ALICE))).status_code == 404
    assert [request.client for request in engine.requests] == [digest_of(ALICE).hex()]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_that_outlives_its_key_is_not_kept(
    tokenizer: Tokenizer, tmp_path: Path, *, is_streamed: bool
) -> None:
    path = tmp_path / "keys"
    add_key(path, KeyRecord("alice", digest_of(ALICE)))
    add_key(path, KeyRecord("bob", digest_of(BOB)))
    engine = ScriptedEngine([(300,), 0.3, (301,)])
    async with running_api(engine, tokenizer, keys=ApiKeys.from_file(path)) as api:
        assert api.backends is not None
        body = {"input": "a secret", "stream": is_streamed}
        asked = api.http.post("/v1/responses", json=body, headers=bearer(ALICE))
        running = asyncio.create_task(asked)
        async with asyncio.timeout(10):
            while not engine.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        remove_key(path, "alice")
        assert (await api.http.get("/v1/models", headers=bearer(BOB))).status_code == 200
        made = await running
        assert (made.status_code, "resp_" in made.text) == (200, True)
        assert api.backends.first.api.responses._by_client == {}
        add_key(path, KeyRecord("alice", digest_of(ALICE)))
        where = f"/v1/responses/resp_{made.text.partition('resp_')[2].partition(chr(34))[0]}"
        assert (await api.http.get(where, headers=bearer(ALICE))).status_code == 404
        # What it is answered from now on is kept.
        again = (await api.http.post("/v1/responses", json={"input": "x"}, headers=bearer(ALICE))).json()
        found = await api.http.get(f"/v1/responses/{again['id']}", headers=bearer(ALICE))
        assert found.status_code == 200


async def test_what_a_file_that_cannot_be_read_says_nothing_of_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice {ALICE}\nbob {BOB}\n")
    keys, store = ApiKeys.from_file(path), ResponseStore()
    keys.on_removed(store.forget)
    alice, bob = found(keys, ALICE).identity, found(keys, BOB).identity
    for client in (alice, bob):
        await store.put(client, "r", StoredResponse([], {}))
    path.write_text("one two three\n")
    assert keys.find(ALICE) is None
    assert store.get(alice, "r")
    path.write_text(f"renamed {BOB}\n")
    assert keys.find(ALICE) is None
    assert store.get(alice, "r") is None
    assert store.get(bob, "r")
