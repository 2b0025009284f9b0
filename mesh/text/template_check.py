"""Check of a chat template by its outcome: short conversations, rendered and tokenized."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from mesh.text.chat_template import Ending
from spanmesh_proto.errors import RequestError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from mesh.text.chat_template import ChatTemplate
    from mesh.text.tokenizer import Tokenizer

Problem = dict[str, Any]

# Names that templates give to control tokens, and to nothing else.
_NAME: Final = re.compile(r"<\|[^\s|<>]{1,40}\|>|<｜[^\s｜<>]{1,40}｜>|<(?:start|end)_of_(?:turn|role)>")
_CONVERSATION: Final = ({"role": "user", "content": "Hello"},)


def problems_of(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    prompt_ids: Callable[[str], array[int]],
) -> list[Problem]:
    """What is wrong with a chat template and a vocabulary, each with `event` and what it is about.

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
        _ = template.needs
    except RequestError as error:
        return [{"event": "chat_template_fails", "reason": error.message}]
    problems: list[Problem] = []
    if hidden:
        problems.append({"event": "chat_template_hides_text", "roles": hidden})
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
    if not is_open and (not ids or ids[-1] in tokenizer.end_tokens):
        problems.append({"event": "chat_template_begins_no_answer"})
    return problems
