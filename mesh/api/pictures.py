"""Pictures of a conversation: bounds, their places in the prompt, and the rows that take these."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mesh.api.message_bodies import note_of
from mesh.api.picture_parts import PicturedText, PicturePart, pictures_in
from mesh.engine import RowInput
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mesh.vision.pictures import ModelPictures, PictureLayout

MOST_NEW: Final = 8
"""Pictures behind the last answer of the assistant."""
MOST_IN_ALL: Final = 64
"""Pictures of a conversation."""
MOST_BYTES: Final = 20 * 2**20
"""Bytes of all pictures of a conversation."""
# So many random bits are in no text of a client.
_MARK_BITS: Final = 128
_NO_PROJECTOR: Final = "this model reads text only"
_NOT_SHOWN: Final = "[image]"


@dataclass(frozen=True)
class ShownConversation:
    """A conversation whose pictures are marks in its texts."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in the form of chat templates."""
    named: Sequence[Mapping[str, Any]]
    """The same without the marks, which differ each time."""
    layouts: Mapping[str, PictureLayout] = field(default_factory=dict)
    """Layouts of the pictures by their marks."""

    def inserted(
        self, tokens: Sequence[int], places: Sequence[tuple[int, int]]
    ) -> tuple[list[int], tuple[RowInput, ...]]:
        """The prompt with the pictures.

        Args:
            tokens: Token ids of the texts.
            places: Of each picture in the prompt its index and the number of these tokens ahead of it.

        Returns:
            Ids of tokens and rows, and the rows.
        """
        layouts = list(self.layouts.values())
        found: list[int] = []
        inputs: list[RowInput] = []
        at = 0
        for index, place in places:
            found += tokens[at:place]
            inputs += _rows_from(len(found), layouts[index])
            found += layouts[index].ids
            at = place
        found += tokens[at:]
        return found, tuple(inputs)


async def shown(
    messages: Sequence[Mapping[str, Any]],
    model: ModelPictures | None,
    *,
    param: str,
    client: str | None,
    random_bits: Callable[[int], int],
) -> ShownConversation:
    """A conversation with a mark in place of each picture, and their layouts.

    A picture of a tool's result that cannot be read has a note in its place, since its client did not choose
    it.

    Args:
        messages: The conversation.
        model: Reads pictures; None if the model does not.
        param: The field that it came from, for errors.
        client: Client of the request, for fair turns.
        random_bits: Returns a random integer of the given number of bits.

    Raises:
        InvalidRequest: If the model reads no pictures, or a picture or their number is out of bounds.
        Overloaded: If too many pictures wait.
    """
    if model is not None:
        _check_bounds(messages, param)
    layouts: dict[str, PictureLayout] = {}

    async def told_of(part: str | PicturePart, role: str) -> tuple[str, bool]:
        """Text in place of a part, and whether it is a mark."""
        if isinstance(part, str):
            return part, False
        try:
            if model is None:
                raise _without_projector(part)
            data = await asyncio.to_thread(part.data)
            layout = await model.layout(data, most_side=part.most_side, client=client, param=part.where)
        except InvalidRequest as error:
            if role != "tool":
                raise
            return note_of(part.kind, _NO_PROJECTOR if model is None else error.message), False
        mark = f"picture{random_bits(_MARK_BITS):032x}"
        layouts[mark] = layout
        return mark, True

    marked: list[Mapping[str, Any]] = []
    named: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, PicturedText):
            told = [await told_of(part, message["role"]) for part in content.parts]
            marked.append({**message, "content": content.prefix + _text(told)})
            told = [(_NOT_SHOWN if is_mark else text, is_mark) for text, is_mark in told]
            named.append({**message, "content": content.prefix + _text(told)})
        else:
            marked.append(message)
            named.append(message)
    return ShownConversation(marked, named, layouts)


def _text(parts: Sequence[tuple[str, bool]]) -> str:
    """Texts on lines of their own, except beside marks, as llama-server joins them.

    Args:
        parts: Texts, and whether each is a mark.
    """
    found = ""
    was_mark = True
    for text, is_mark in parts:
        found += text if was_mark or is_mark else f"\n{text}"
        was_mark = is_mark
    return found


def _rows_from(first: int, layout: PictureLayout) -> Iterator[RowInput]:
    """Rows of a picture whose first id is at that place in the prompt."""
    for number, chunk in enumerate(layout.chunks):
        at = replace(chunk, first_row=first + chunk.first_row)
        yield RowInput(at, partial(layout.load, number), layout.is_carried)


def _check_bounds(messages: Sequence[Mapping[str, Any]], param: str) -> None:
    """Check number and size of the pictures of a conversation.

    Raises:
        InvalidRequest: If they are too many or too large.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    every = list(pictures_in(messages))
    num_new = sum(1 for _ in pictures_in(messages[answers[-1] + 1 :] if answers else messages))
    num_bytes = sum(picture.num_bytes for picture in every)
    if num_new > MOST_NEW:
        raise InvalidRequest(
            f"{param}: {num_new} pictures are behind the last answer: at most {MOST_NEW} work, send the"
            " others in a further turn",
            param=param,
        )
    if len(every) > MOST_IN_ALL:
        raise InvalidRequest(
            f"{param}: the conversation has {len(every)} pictures: at most {MOST_IN_ALL} work, leave out"
            " early ones",
            param=param,
        )
    if num_bytes > MOST_BYTES:
        raise InvalidRequest(
            f"{param}: the pictures of the conversation have {num_bytes} bytes: at most {MOST_BYTES} work,"
            " scale them down or send them as JPEG",
            param=param,
        )


def _without_projector(part: PicturePart) -> InvalidRequest:
    return InvalidRequest(
        f"{part.where} is a picture, and {_NO_PROJECTOR}: leave it out, or serve a model with its projector,"
        " --mmproj",
        param=part.where,
    )
