"""Bodies that another process parses: the same body, or the same error, as without it."""

import itertools
import json
import math
import sys
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from mesh.api import body_worker
from mesh.api.admin import RehearsalBody
from mesh.api.body_worker import decode, encode
from mesh.api.embeddings import EmbeddingsBody
from mesh.api.messages.protocol import CountBody, MessagesBody
from mesh.api.protocol import ChatBody, CompletionBody
from mesh.api.request_parsing import parse_body
from mesh.api.responses.protocol import ResponsesBody
from mesh.api.tokenization import DetokenizeBody, TokenizeBody
from mesh.options.model import LoadRequest
from spanmesh_proto.errors import InvalidRequest

MOST_VALUES = 2**18
TEXTS = st.text(max_size=8) | st.sampled_from(["", "é語🙂", "\ud800", "a" * 70_000, "語" * 70_000])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**40])
    | st.floats()
    | TEXTS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS})
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS})},
    optional={"id": TEXTS, "type": st.just("function"), "more": VALUES},
)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": TEXTS | st.lists(PARTS, max_size=3),
    },
    optional={"tool_calls": st.lists(CALLS, max_size=2), "name": VALUES, "reasoning_content": TEXTS},
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["look", "go"])},
    optional={"description": TEXTS, "parameters": st.dictionaries(TEXTS, VALUES, max_size=3)},
)
NAMED = {"type": "function", "function": {"name": "look"}}
CHOICES = st.sampled_from(
    [
        "auto",
        NAMED,
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "go"}]},
        {"type": "tool", "name": "go"},
        {"type": "any"},
    ]
)
IDS = st.lists(st.integers(0, 9), min_size=1, max_size=3)
PROMPTS = TEXTS | IDS | st.lists(TEXTS, max_size=3) | st.lists(IDS, max_size=3)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": TEXTS,
    "messages": st.lists(MESSAGES, max_size=3),
    "prompt": PROMPTS,
    "input": PROMPTS | st.lists(VALUES, max_size=3),
    "tokens": IDS,
    "max_tokens": st.integers(0, 3),
    "tools": st.lists(
        st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS})
        | FUNCTIONS.map(lambda function: {"type": "function", **function})
        | FUNCTIONS.map(
            lambda function: {"type": "namespace", "name": "n", "tools": [{"type": "function", **function}]}
        ),
        max_size=2,
    ),
    "tool_choice": CHOICES,
    "stop": TEXTS | st.lists(TEXTS, max_size=2),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "2"]), st.sampled_from([1, -2.5]), max_size=2),
    "temperature": st.sampled_from([0, 0.5, 1]),
    "seed": st.sampled_from([0, 2**64 - 1, -(2**63)]),
    "speculation": st.fixed_dictionaries({}, optional={"mode": st.just("off"), "depth": st.just(2)}),
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": TEXTS}),
    "json_schema": st.dictionaries(TEXTS, VALUES, max_size=2),
    "chat_template_kwargs": st.dictionaries(TEXTS, VALUES, max_size=3),
    "thinking": st.just({"type": "enabled", "budget_tokens": 3}),
    "hosts": st.just([{"host": "a", "orders": []}]),
}
# Of these each kind knows some, and needs no others.
GOOD: dict[str, Any] = {
    "model": "some",
    "messages": [{"role": "user", "content": "a"}],
    "prompt": "a",
    "input": "a",
    "tokens": [1],
    "max_tokens": 1,
    "draft_path": "/a/draft.gguf",
    "split": [3, 4],
    "hosts": [{"host": "a", "orders": [{"blank": {"header": "R0dVRg==", "num_bytes": 9}}]}],
}
KINDS: list[type[BaseModel]] = [
    ChatBody,
    CompletionBody,
    MessagesBody,
    CountBody,
    ResponsesBody,
    TokenizeBody,
    DetokenizeBody,
    EmbeddingsBody,
    LoadRequest,
    RehearsalBody,
]


def elsewhere(data: bytes, kind: type[BaseModel]) -> Any:
    """What a worker makes of a body."""
    answer = body_worker.handle(body_worker.job_header(kind, MOST_VALUES), data)
    if answer.startswith(body_worker.REFUSED):
        message, param = msgpack.unpackb(answer[1:], unicode_errors="surrogatepass")
        raise InvalidRequest(message, param=param)
    return decode(answer[1:], data)


def outcome(parse: Any, data: bytes, kind: type[BaseModel]) -> tuple[Any, ...]:
    """All that can be seen of a body, or of an error."""
    try:
        body = parse(data, kind)
    except InvalidRequest as error:
        return ("error", error.message, error.param)
    return ("body", seen(body))


def seen(value: Any) -> Any:
    """Types and contents of a value, order included; numbers as texts, since one may be none."""
    match value:
        case BaseModel():
            return type(value), seen(vars(value)), seen(value.model_extra), sorted(value.model_fields_set)
        case dict():
            return [(key, seen(inner)) for key, inner in value.items()]
        case list() | tuple():
            return type(value), [seen(inner) for inner in value]
    return type(value), repr(value)


def assert_alike(data: bytes, kind: type[BaseModel]) -> None:
    assert outcome(elsewhere, data, kind) == outcome(
        lambda data, kind: parse_body(data, kind, MOST_VALUES), data, kind
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_of_each_kind_comes_back(kind: type[BaseModel]) -> None:
    fields = {name: value for name, value in GOOD.items() if name in kind.model_fields}
    data = json.dumps(fields).encode()
    what, *_ = outcome(elsewhere, data, kind)
    assert what == "body"
    assert_alike(data, kind)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_bodies_of_all_kinds_are_alike(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    # Mostly what the kind knows, else almost all would be refused.
    known = [name for name in FIELDS if name in kind.model_fields]
    needed = [name for name, field in kind.model_fields.items() if field.is_required() and name in FIELDS]
    names = {*needed, *data.draw(st.lists(st.sampled_from(known), max_size=4))} if known else set()
    fields = {name: data.draw(FIELDS[name]) for name in sorted(names)}
    fields |= data.draw(st.dictionaries(st.sampled_from(["", "more", "best_of"]), VALUES, max_size=1))
    assert_alike(json.dumps(fields).encode(), kind)


@settings(deadline=None)
@given(data=st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
@example(b'{"messages":[{"role":"user","content":"' + b"\xff" + b'"}]}')
@example(b'{"messages":' + b"[" * 100_000)
@example(b'{"seed":' + b"9" * 5000 + b"}")
def test_what_is_no_body_is_refused_alike(data: bytes) -> None:
    assert_alike(data, ChatBody)


@pytest.mark.parametrize(
    "value",
    [
        list(range(10_000)),
        {str(number): [number] for number in range(5000)},
        {"": 1, "a": {"": {"": [math.inf, -0.0]}}},
        [[[{}] * 3000] * 3, "a" * 3_000_000],
        {"k" * 70_000: "語" * 2_000_000},
        [[]] * 4097 + [{"a": None}] * 2049,
    ],
    ids=["long list", "long object", "empty names", "nested", "long texts", "empty containers"],
)
def test_large_values_are_alike(value: Any) -> None:
    fields = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": value}}
    assert_alike(json.dumps(fields).encode(), ChatBody)


@pytest.mark.parametrize(
    ("text", "is_told_by_place"),
    [
        ("QUJD" * 300_000, True),
        ("語" * 100_000, True),
        # The same beginning many times, and once with the right end.
        ("".join(f"{'b' * 64}{number}" for number in range(20_000)), True),
        ('quoted "text" ' * 100_000, False),
    ],
    ids=["base64", "not ASCII", "repeated", "escaped"],
)
def test_a_long_text_that_stands_in_the_request_does_not_come_back(
    text: str, *, is_told_by_place: bool
) -> None:
    fields = {"messages": [{"role": "user", "content": text}], "chat_template_kwargs": {"x": text[:100_000]}}
    data = json.dumps(fields, ensure_ascii=False).encode()
    assert_alike(data, ChatBody)
    answer = body_worker.handle(body_worker.job_header(ChatBody, MOST_VALUES), data)
    assert (len(answer) < 2000) is is_told_by_place


def test_long_texts_are_found_in_any_order() -> None:
    fields = {"input": "QUJD" * 30_000, "instructions": "REVG" * 30_000, "model": "R0hJ" * 30_000}
    for names in itertools.permutations(fields):
        data = json.dumps({name: fields[name] for name in names}).encode()
        assert_alike(data, ResponsesBody)
        assert len(body_worker.handle(body_worker.job_header(ResponsesBody, MOST_VALUES), data)) < 3000


class CountedBytes(bytes):
    """Counts how often something is looked for."""

    num_finds = 0

    def find(self, *args: Any) -> int:
        self.num_finds += 1
        return super().find(*args)


def test_long_texts_that_do_not_stand_in_the_request_are_not_looked_for_without_end() -> None:
    texts = [f'{number} "quoted" ' + "a" * 70_000 for number in range(100)]
    messages = [{"role": "user", "content": text} for text in texts]
    data = CountedBytes(json.dumps({"messages": messages}).encode())
    body = parse_body(data, ChatBody, MOST_VALUES)
    assert decode(encode(body, data), data) == body
    assert 0 < data.num_finds < 20


@pytest.mark.parametrize("levels", [90, 101, 300, 700])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}"), ('[{"":', "}]")])
def test_deep_values_are_alike(begin: str, end: str, levels: int) -> None:
    levels //= len(begin.replace('"a":', "").replace('"":', ""))
    text = f'{{"messages":[{{"role":"user","content":"a","x":{begin * levels}1{end * levels}}}]}}'
    body, found = parse_body(text.encode(), ChatBody, MOST_VALUES), elsewhere(text.encode(), ChatBody)
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        assert seen(found) == seen(body)
    finally:
        sys.setrecursionlimit(usual)


@pytest.mark.parametrize("name", ["os:system", "mesh.api.auth:KeyGate", "mesh.api.protocol:parse_stop", "x"])
def test_only_classes_of_bodies_are_made(name: str) -> None:
    piece = msgpack.packb([{body_worker.MODEL: [name, None, []]}])
    with pytest.raises(ValueError, match="is no class of request bodies"):
        decode(body_worker._COUNT.pack(1) + body_worker._PIECE.pack(len(piece), *[False]) + piece)


def test_a_body_is_itself() -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hello"}], "n": 2})
    assert decode(encode(body)) == body
