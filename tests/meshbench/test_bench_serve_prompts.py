"""What `mesh bench serve` asks, and whom."""

import json
from pathlib import Path

import pytest

from mesh.text.tokenizer import Tokenizer
from meshbench.datasets import Asking, Prompt, draw, made_up_prompts, read_dataset
from meshbench.http_client import EndpointName, parse_url
from spanmesh_proto.errors import InvalidRequest, MeshError


@pytest.mark.model
@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_made_up_prompts_are_as_long_as_wanted(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer(request.getfixturevalue(model))
    for num_tokens in (1, 10, 200):
        for prompt in made_up_prompts(8, num_tokens, seed=3):
            # The first word has no space before it, which may cost a token or two.
            num_encoded = len(tokenizer.encode(prompt.text, add_special=False, parse_special=False))
            assert num_tokens <= num_encoded <= num_tokens + 2


def test_made_up_prompts_follow_from_the_seed_and_differ() -> None:
    prompts = made_up_prompts(20, 12, seed=1)
    assert prompts == made_up_prompts(20, 12, seed=1)
    assert not {prompt.text for prompt in prompts} & {
        prompt.text for prompt in made_up_prompts(20, 12, seed=2)
    }
    assert len({prompt.text for prompt in prompts}) == 20


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_dataset_may_be_of_three_kinds(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    path = write(
        tmp_path / "questions.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        "",
        {"prompt": "Hello", "id": "greeting"},
        {"messages": chat},
    )
    assert read_dataset(path, "chat") == (
        Prompt("81", "Write."),
        Prompt("greeting", "Hello"),
        Prompt("4", messages=tuple(chat)),
    )


@pytest.mark.parametrize(
    ("line", "endpoint", "words"),
    [
        ("{", "chat", "line 2: not JSON"),
        ([1], "chat", "line 2: not a JSON object"),
        ({"text": "Hello"}, "chat", "line 2: neither `prompt`"),
        ({"prompt": ""}, "chat", "line 2: neither `prompt`"),
        ({"prompt": 5}, "chat", "line 2: neither `prompt`"),
        ({"messages": []}, "chat", "line 2: neither `prompt`"),
        ({"messages": ["Hello"]}, "chat", "line 2: neither `prompt`"),
        ({"turns": []}, "chat", "line 2: neither `prompt`"),
        ({"messages": [{"role": "user"}]}, "completions", "line 2: raw completions have no messages"),
    ],
)
def test_a_wrong_line_is_named(line: object, endpoint: EndpointName, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "questions.jsonl", {"prompt": "Hello"}, line)
    with pytest.raises(MeshError, match=rf"questions\.jsonl, {words}"):
        read_dataset(path, endpoint)


def test_a_file_without_prompts_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "empty.jsonl", "", "")
    with pytest.raises(MeshError, match=r"empty\.jsonl holds no prompt"):
        read_dataset(path, "chat")
    with pytest.raises(MeshError, match=r"none\.jsonl: No such file"):
        read_dataset(tmp_path / "none.jsonl", "chat")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(MeshError, match=r"latin\.jsonl: it is not UTF-8"):
        read_dataset(tmp_path / "latin.jsonl", "chat")


def test_prompts_are_drawn_once_each_before_any_comes_again() -> None:
    prompts = [Prompt(str(number)) for number in range(10)]
    drawn = draw(prompts, 25, seed=1)
    assert sorted(drawn[:10], key=lambda prompt: int(prompt.id)) == prompts
    assert drawn[:10] == drawn[10:20]
    assert drawn == draw(prompts, 25, seed=1)
    assert drawn != draw(prompts, 25, seed=2)


def test_a_body_says_what_was_asked_for_and_nothing_else() -> None:
    asking = Asking("chat", "m", 16)
    assert json.loads(asking.body(Prompt("1", "Hello"))) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asking = Asking(
        "completions", "m", 16, 0.0, ignore_eos=True, extra_body={"top_k": 5, "stream_options": None}
    )
    assert json.loads(asking.body(Prompt("1", "Hello"))) == {
        "model": "m",
        "prompt": "Hello",
        "max_tokens": 16,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "top_k": 5,
    }


@pytest.mark.parametrize(
    ("url", "host", "port", "is_tls", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, False, ""),
        ("http://127.0.0.1:8000/v1/", "127.0.0.1", 8000, False, ""),
        ("https://example.org/models/v1", "example.org", 443, True, "/models"),
        ("http://[::1]:80/x/", "::1", 80, False, "/x"),
        ("http://example.org", "example.org", 80, False, ""),
    ],
)
def test_an_address_is_taken_apart(url: str, host: str, port: int, prefix: str, *, is_tls: bool) -> None:
    server = parse_url(url)
    assert (server.host, server.port, server.is_tls, server.prefix) == (host, port, is_tls, prefix)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x:70000", "[::1"]
)
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(InvalidRequest, match="write http://HOST:PORT"):
        parse_url(url)
