"""`mesh draft record` over a real mesh: its answers are recorded, within the key's limits, and once."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.cli.main import run
from mesh.serve.recording import OpenRecorder
from mesh.tuning.prompts import Prompt
from mesh.tuning.regenerate import ChatServer, Regeneration, Wanted
from spanmesh_proto.errors import ClusterError, Unauthorized
from tests.support.api_harness import KEY, ScriptedEngine, running_api, tokenizer
from tests.support.mesh_in_process import mesh_in_process
from tests.support.recorded_answers import NEEDS, recording

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mesh.text.tokenizer import Tokenizer

__all__ = ["tokenizer"]

pytestmark = pytest.mark.model

ALICE = KeyRecord("alice", digest_of(KEY), may_record=True, max_concurrent=2)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_served_model_answers_what_is_not_recorded(
    smollm2_path: Path,
    stage_cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(stage_cache_dir))
    monkeypatch.setenv("MESH_API_KEY", KEY)
    prompts, folder = tmp_path / "question.jsonl", tmp_path / "of"
    lines: list[dict[str, Any]] = [
        {"prompt": "Count from one to ten."},
        {"question_id": 81, "turns": ["What is a tree?", "Name two of them."]},
        {"prompt": "word " * 400},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))

    async def record(words: str, *options: str) -> tuple[int, str]:
        arguments = ["draft", "record", words, "-o", str(folder), "--max-tokens", "6", *options]
        code = await asyncio.to_thread(run, [*arguments, "--url", f"{served.api.url}/v1"])
        said = capsys.readouterr()
        return code, f"{said.out}{said.err}"

    agreed = [frozenset({ALICE.digest.hex()})]
    with recording(smollm2_path, folder, lambda: agreed[-1]) as recorded:
        opened = OpenRecorder(recorded.recorder, NEEDS)
        async with mesh_in_process(smollm2_path, keys=ApiKeys([ALICE]), recording=opened) as served:
            code, said = await record(str(prompts))
            assert code == 0, said
            assert "3 answers of 18 tokens recorded\n" in said
            assert "1 prompts were left out: " in said
            await until(lambda: recorded.recorder.status().written == 3)
            code, said = await record(str(prompts))
            assert "0 answers of 0 tokens recorded; 2 prompts had been recorded before" in said
            code, said = await record("own:1", "--temperature", "1")
            assert "1 answers of 6 tokens recorded\n" in said
            await until(lambda: recorded.recorder.status().written == 4)
            prompts.write_text('{"prompt": "1, 2, 3,"}')
            code, said = await record(str(prompts), "--raw")
            assert "1 answers of 6 tokens recorded\n" in said
            await until(lambda: recorded.recorder.status().written == 5)
            other = tmp_path / "other"
            other.mkdir()
            code, said = await record(str(prompts), "-o", str(other))
            assert code == 1
            assert f"does not record into {other}" in said
            found = recorded.conversations()
            # The API learns later than the recorder what a key may.
            agreed.append(frozenset())
            await until(lambda: recorded.recorder.status().erased == 5)
            prompts.write_text('{"prompt": "One more."}')
            code, said = await record(str(prompts))
            assert code == 1
            assert f"{folder}: none of 1 answers was recorded: hidden states did not come, or" in said
    assert [each.num_answer_tokens for each in found] == [6] * 5
    assert {each.info.key_digest for each in found} == agreed[0]
    assert sorted(each.info.api for each in found) == ["chat"] * 4 + ["raw"]
    turns = [each for each in found if 0.6 < each.info.temperature < 0.8 and each.info.api == "chat"]
    assert len({each.info.prompt_id for each in turns}) == 2
    own = [each for each in found if each.info.temperature == 1]
    assert [each.info.prompt_id for each in own] == ["own-0"]
    served_tokenizer = served.api.backends.first.tokenizer if served.api.backends else None
    assert served_tokenizer is not None
    written = served_tokenizer.encode("<|im_start|>user", add_special=False, parse_special=True)
    assert all(set(written) <= set(map(int, each.token_ids)) for each in own)


async def test_a_mesh_that_records_nothing_is_named(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_api(ScriptedEngine([(300,), (301,)]), tokenizer) as api:
        arguments = ["draft", "record", "own:1", "-o", str(tmp_path / "of"), "--url", api.url]
        assert await asyncio.to_thread(run, arguments) == 1
        assert "records nothing: start it with `mesh serve MODEL --record" in capsys.readouterr().err
        assert await asyncio.to_thread(run, [*arguments, "--tap-layers", "2,15,27"]) == 2
        assert "name them with --for MODEL" in capsys.readouterr().err


async def test_requests_keep_to_the_limits_of_their_key(tokenizer: Tokenizer) -> None:
    """A prompt that is refused for now is asked for again; one that is wrong is counted."""
    waits: list[float] = []

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)
        await asyncio.sleep(0.02)

    one = KeyRecord("alice", digest_of(KEY), may_record=True, max_concurrent=1)
    engine = ScriptedEngine([(300,), 0.05, (301,)])
    prompts = [Prompt(f"prompt {number}", (f"Hello {number}",)) for number in range(4)]
    prompts.append(Prompt("long", ("word " * 400,)))
    progress: list[tuple[int, int]] = []
    async with (
        running_api(engine, tokenizer, keys=ApiKeys([one]), records=True) as api,
        ChatServer(api.url, KEY, sleep=sleep) as server,
    ):
        known = ["prompt 0", "prompt 0", "prompt 9"]
        regeneration = Regeneration(
            server, Wanted(0.7, 8, 3), known, lambda done, total: progress.append((done, total))
        )
        result = await regeneration.run([*prompts, prompts[1]])
    assert (result.num_answers, result.num_tokens, result.num_known) == (4, 8, 1)
    assert sum(result.refused.values()) == 1
    assert "context" in result.refused.most_common()[0][0]
    assert waits
    assert min(waits) > 0
    assert progress[-1] == (6, 6)
    asked = [request.recording.id for request in engine.requests if request.recording is not None]
    assert sorted(asked) == ["prompt 1", "prompt 1", "prompt 2", "prompt 3"]


async def test_what_no_prompt_can_help_ends_all(tokenizer: Tokenizer) -> None:
    prompts = [Prompt(f"prompt {number}", ("Hello",)) for number in range(9)]

    async def run_with(url: str, key: str | None) -> None:
        async with ChatServer(url, key) as server:
            await Regeneration(server, Wanted(0.7, 8, 2), (), lambda _done, _total: None).run(prompts)

    engine = ScriptedEngine([(300,), (301,)])
    bob = KeyRecord("bob", digest_of(KEY))
    async with running_api(engine, tokenizer, keys=ApiKeys([bob]), records=True) as api:
        with pytest.raises(ClusterError, match="may-record=yes"):
            await run_with(api.url, KEY)
        with pytest.raises(Unauthorized, match="unknown to this server"):
            await run_with(api.url, "sk-wrong")
        assert engine.requests == []
    with pytest.raises(ClusterError, match=r"no mesh answers at .* are not asked for again"):
        await run_with(api.url, KEY)
