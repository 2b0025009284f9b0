"""Pictures in request bodies: forms, refusals, base64, and the text beside them."""

from __future__ import annotations

import base64
import json
import secrets
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.chat_prompt import conversation_of
from mesh.api.messages.protocol import messages_of as turns_of_messages
from mesh.api.picture_parts import PicturedText, PicturePart, joined
from mesh.api.pictures import MOST_BYTES, MOST_IN_ALL, MOST_NEW, shown
from mesh.api.protocol import ChatBody
from mesh.api.request_parsing import parse_body
from mesh.api.responses.protocol import messages_of as items_of_responses
from mesh.vision.encoder import EncoderProcess
from mesh.vision.pictures import ModelPictures
from spanmesh_proto.errors import InvalidRequest
from stages.vision.projector import ProjectorOptions

PNG = base64.b64encode(b"\x89PNG not really").decode()
URL = f"data:image/png;base64,{PNG}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": PNG}
# Never started here: bounds are checked before.
MODEL = ModelPictures(EncoderProcess(ProjectorOptions("mmproj.gguf", "model.gguf", num_threads=1)))


def chat(*parts: Any, role: str = "user") -> list[Any]:
    """Messages of a chat with one message of these parts, as a template would get them."""
    body = {"messages": [{"role": role, "content": list(parts)}]}
    if role == "tool":
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        body["messages"].insert(0, {"role": "assistant", "content": "", "tool_calls": [call]})
    return list(conversation_of(ChatBody.model_validate(body)).messages)


def response(*parts: Any) -> list[Any]:
    return items_of_responses([{"role": "user", "content": list(parts)}])


def anthropic(*parts: Any) -> list[Any]:
    return turns_of_messages([{"role": "user", "content": list(parts)}], None)


FORMS = [
    (chat, {"type": "image_url", "image_url": {"url": URL}}, None),
    (chat, {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, "low"),
    (chat, {"type": "image_url", "image_url": URL}, None),
    (response, {"type": "input_image", "image_url": URL}, None),
    (response, {"type": "input_image", "image_url": URL, "detail": "high", "file_id": None}, "high"),
    (anthropic, {"type": "image", "source": SOURCE}, None),
    (anthropic, {"type": "image", "source": {"type": "url", "url": URL}}, None),
]


@pytest.mark.parametrize(("api", "part", "detail"), FORMS)
def test_each_api_takes_pictures_in_its_own_form(api: Any, part: Any, detail: str | None) -> None:
    ((message),) = api({"type": "text", "text": "What is it?"}, part)
    text, picture = message["content"].parts
    assert (text, picture.detail, picture.data()) == ("What is it?", detail, base64.b64decode(PNG))
    place = "input[0]" if api is response else "messages[0]"
    assert picture.where == f"{place}.content[1]"


SEND = "send the picture itself, as data:image/png;base64"
REFUSED = [
    (chat, {"type": "image_url", "image_url": {"url": "https://host/a.png"}}, "fetches nothing: " + SEND),
    (chat, {"type": "image_url", "image_url": "file:///etc/passwd"}, "fetches nothing"),
    (chat, {"type": "image_url", "image_url": {"url": "data:image/png,%89PNG"}}, "is not in base64"),
    (chat, {"type": "image_url", "image_url": {"url": "data:"}}, "fetches nothing"),
    (chat, {"type": "image_url"}, "has no image_url"),
    (chat, {"type": "image_url", "image_url": {"url": 3}}, "has no image_url"),
    (chat, {"type": "image_url", "image_url": {"url": URL, "detail": "most"}}, "send one of low, high, auto"),
    (
        chat,
        {"type": "image_url", "image_url": {"url": URL, "detail": ["low"]}},
        "send one of low, high, auto",
    ),
    (chat, {"type": "input_audio", "input_audio": {}}, "accepts texts and pictures only"),
    (response, {"type": "input_image", "file_id": "file-1"}, "this server keeps no files: " + SEND),
    (response, {"type": "input_image", "image_url": None}, "has no image_url"),
    (response, {"type": "input_file"}, "accepts texts and pictures only"),
    (anthropic, {"type": "image", "source": {"type": "url", "url": "http://h"}}, "fetches nothing: " + SEND),
    (anthropic, {"type": "image", "source": {"type": "file", "file_id": "f"}}, "send one of type base64"),
    (anthropic, {"type": "image", "source": {"type": "base64"}}, "has a source without data"),
    (anthropic, {"type": "image"}, "has no source"),
    (anthropic, {"type": "document", "source": {}}, "reads texts and pictures only"),
]


@pytest.mark.parametrize(("api", "part", "reason"), REFUSED)
def test_what_is_refused_is_named_with_its_place_and_the_remedy(api: Any, part: Any, reason: str) -> None:
    parts = [{"type": "text", "text": "x"}, part]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    with pytest.raises(InvalidRequest) as refused:
        parse_body(body, ChatBody, 999) if api is chat else api(*parts)
    assert reason in refused.value.message
    assert "1" in refused.value.message
    place = "input[0]" if api is response else "messages[0]"
    assert str(refused.value.param).startswith(f"{place}.content")


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_show_pictures(role: str) -> None:
    with pytest.raises(ValueError, match="in messages of the user and in results of tools"):
        chat({"type": "image_url", "image_url": URL}, role=role)


@given(
    data=st.binary(max_size=200),
    encode=st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]),
    padding=st.sampled_from(["", "="]),
    width=st.sampled_from([0, 4, 5, 76]),
    start=st.integers(0, 9),
)
def test_base64_is_read_as_clients_write_it(
    data: bytes, encode: Any, padding: str, width: int, start: int
) -> None:
    text = encode(data).decode().rstrip(padding or "=")
    if width:
        text = "\r\n".join(text[at : at + width] for at in range(0, len(text), width))
    assert PicturePart(text="#" * start + text, start=start).data() == data


@pytest.mark.parametrize("text", ["a", "a===", "QQ=Q", "ä", "QUJD*", "=QQ="])
def test_what_is_no_base64_is_said_so(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[2\]: the picture is no base64"):
        PicturePart(text=text, where="messages[2]").data()


def test_long_base64_is_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.api.picture_parts._STEP_CHARS", 5)
    data = bytes(range(256))
    for text in (base64.b64encode(data).decode(), base64.encodebytes(data).decode()):
        assert PicturePart(text=text).data() == data


async def texts_of(messages: list[Any], model: ModelPictures | None = None) -> list[str]:
    found = await shown(messages, model, param="messages", client=None, random_bits=secrets.randbits)
    return [message["content"] for message in found.messages]


async def test_without_a_projector_a_user_is_told_of_mmproj_and_a_tool_has_a_note() -> None:
    picture = {"type": "image_url", "image_url": URL}
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[1\] is a picture, .*--mmproj") as told:
        await texts_of(chat({"type": "text", "text": "x"}, picture))
    assert told.value.param == "messages[0].content[1]"
    seen = [{"type": "text", "text": "a"}, picture, picture, {"type": "text", "text": "b"}]
    note = "[image_url left out: this model reads text only]"
    assert (await texts_of(chat(*seen, role="tool")))[1] == f"a\n{note}\n{note}\nb"


async def test_a_picture_of_a_tool_in_a_form_that_is_not_read_has_the_reason_as_its_note() -> None:
    """A refusal would end the conversation, whose client did not choose it."""
    messages = chat({"type": "image_url", "image_url": "http://h/p.png"}, role="tool")
    (_, told) = await texts_of(messages, MODEL)
    assert told.startswith("[image_url left out: part 0 has the URL 'http://h/p.png', and this server")
    assert (await texts_of(messages))[1] == "[image_url left out: this model reads text only]"


async def test_an_error_with_a_picture_says_so_first() -> None:
    image = {"type": "image", "source": SOURCE}
    block = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [image]}
    (message,) = turns_of_messages([{"role": "user", "content": [block]}], None)
    assert message["content"].pictures[0].where == "messages[0].content[0].content[0]"
    assert await texts_of([message]) == ["Error: [image left out: this model reads text only]"]


@pytest.mark.parametrize(
    ("num_old", "num_new", "num_bytes", "reason"),
    [
        (0, MOST_NEW + 1, 1, f"{MOST_NEW + 1} pictures are behind the last answer: at most {MOST_NEW} work"),
        (MOST_IN_ALL, 1, 1, f"the conversation has {MOST_IN_ALL + 1} pictures: at most {MOST_IN_ALL} work"),
        (1, 1, MOST_BYTES // 2 + 2, f"at most {MOST_BYTES} work, scale them down"),
    ],
)
async def test_number_and_size_of_pictures_are_bounded(
    num_old: int, num_new: int, num_bytes: int, reason: str
) -> None:
    text = "A" * (num_bytes * 4 // 3)
    old, new = (
        {"role": "user", "content": PicturedText(parts=(PicturePart(text=text),) * count)}
        for count in (num_old, num_new)
    )
    messages = [old, {"role": "assistant", "content": "Yes."}, new]
    with pytest.raises(InvalidRequest) as refused:
        await texts_of(messages, MODEL)
    assert reason in refused.value.message
    assert refused.value.param == "messages"


def test_texts_are_joined_as_ever() -> None:
    assert joined(["a", "b"]) == "a\nb"
    assert joined([]) == ""
