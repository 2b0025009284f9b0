"""Check of a chat template by its outcome: short conversations, rendered and tokenized."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from mesh.text.chat_template import Ending
from spanmesh_proto.errors import RequestError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from mesh.text.chat_template import ChatTemplate
    from mesh.text.tokenizer import Tokenizer

Problem = dict[str, Any]
# Names that templates give to control tokens, and to nothing else.
_NAME: Final = re.compile(r"<\|[^\s|<>]{1,40}\|>|<｜[^\s｜<>]{1,40}｜>|<(?:start|end)_of_(?:turn|role)>")
_CONVERSATION: Final = ({"role": "user", "content": "Hello"},)
_ANSWERED: Final = (*_CONVERSATION, {"role": "assistant", "content": "Greetings"})
_TURNS: Final = tuple(f"turn {number}" for number in range(1000, 1032))
# More lines, characters and turns than a template could leave out of `_CONVERSATION`.
_LINES: Final = tuple(f"line {number} of a long text" for number in range(1000, 1100))
_LONG: Final = (
    {"role": "user", "content": "\n".join(_LINES)},
    {"role": "assistant", "content": "\n".join(_LINES)},
    *({"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(_TURNS)),
    *_CONVERSATION,
)


def problems_of(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    prompt_ids: Callable[[str], array[int]],
) -> list[Problem]:
    """Faults of a chat template and a vocabulary, each with `event` and its subject.

    A file that says something wrong of itself is served all the same: its answers are worse, and the operator
    should know why.

    Args:
        template: The template.
        tokenizer: Vocabulary of the same file.
        prompt_ids: Token ids of a rendered prompt.
    """
    try:
        prompt = template.render(_CONVERSATION)
        closed = template.render(_CONVERSATION, ending=Ending.MESSAGES)
        hidden = sorted(template.hidden_roles)
        is_whole = _has_all(template.render(_LONG), (*_LINES, *_LINES, *_TURNS))
        answered = template.render(_ANSWERED, ending=Ending.MESSAGES)
        _ = template.needs
    except RequestError as error:
        return [{"event": "chat_template_fails", "reason": error.message}]
    problems: list[Problem] = []
    if hidden:
        problems.append({"event": "chat_template_hides_text", "roles": hidden})
    if not is_whole and not {"user", "assistant"} & set(hidden):
        problems.append({"event": "chat_template_shortens_text"})
    if (name := _wrong_end(tokenizer, answered)) is not None:
        problems.append({"event": "chat_template_ends_answers_otherwise", "token": name})
    problems += _problems_at_ends(tokenizer, prompt_ids(prompt), is_open=prompt != closed)
    names = sorted(set(_NAME.findall(prompt)))
    unknown = [name for name in names if not any(name == token.name for token in tokenizer.special_tokens)]
    if unknown:
        problems.append({"event": "chat_template_names_unknown_tokens", "names": unknown})
    return problems


def _problems_at_ends(tokenizer: Tokenizer, ids: array[int], *, is_open: bool) -> list[Problem]:
    """Problems of the first and the last token of a prompt."""
    problems: list[Problem] = []
    bos = tokenizer.special_token(tokenizer.bos) if tokenizer.bos else None
    if bos is not None and ids[:2].tolist() == [bos, bos]:
        problems.append({"event": "chat_template_begins_twice", "token": tokenizer.bos})
    # A line end may follow the token that ends a turn.
    last = next((token for token in reversed(ids) if tokenizer.name(token).strip()), None)
    if not is_open and (last is None or _is_end(tokenizer, last)):
        problems.append({"event": "chat_template_begins_no_answer"})
    return problems


def _wrong_end(tokenizer: Tokenizer, answered: str) -> str | None:
    """The token behind an answer, if neither it nor another one there ends answers that are generated."""
    _, shown, behind = answered.rpartition(_ANSWERED[-1]["content"])
    names = [token for token in tokenizer.special_tokens if shown and token.name in behind]
    if not names or any(_is_end(tokenizer, token.token) for token in names):
        return None
    return min(names, key=lambda token: (behind.index(token.name), -len(token.name))).name


def _is_end(tokenizer: Tokenizer, token: int) -> bool:
    return token in tokenizer.end_tokens


def _has_all(prompt: str, texts: Sequence[str]) -> bool:
    """Whether a prompt has some texts, in their order."""
    place = 0
    for text in texts:
        place = prompt.find(text, place) + len(text)
        if place < len(text):
            return False
    return True
