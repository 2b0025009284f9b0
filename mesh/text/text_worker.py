"""Process for texts of clients: renders chat templates, makes token ids of texts and texts of ids.

All native code that sees what clients send runs here, and so do templates, which are programs out of a file:
a text that ends this process ends no answer but its own. It has nothing of the head's environment, can write
no file and holds no secret; see `mesh.util.worker_main` for its bounds.

The functions whose names begin with `do_` are the kinds of jobs. Vocabularies stay loaded, the latest few.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mesh.text.chat_template import ChatTemplate, Ending
from mesh.text.client_text import require_unicode
from mesh.text.detokenizer import AnswerText
from mesh.text.reasoning_parser import end_of_reasoning
from mesh.text.template_check import problems_of
from mesh.text.text_encoder import TextEncoder, refuse_too_long_text
from mesh.text.text_jobs import packed_answer, packed_error, unpacked_job
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import InvalidRequest, MeshError, ModelError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping, Sequence

    from mesh.text.text_jobs import TextModel

_MOST_MODELS: Final = 8
# Nested values come as deep as the head's own parser takes them; each level takes two calls here.
_MOST_CALLS: Final = 10_000


class ModelTexts:
    """Vocabulary and templates of a model.

    Args:
        model: The model.

    Raises:
        ModelError: If its file is another one than it was.

    Attributes:
        tokenizer: Its vocabulary.
        encoder: Makes token ids.
    """

    def __init__(self, model: TextModel) -> None:
        path = Path(model.path)
        self.tokenizer = Tokenizer(path)
        if self.tokenizer.stamp != model.stamp:
            raise ModelError(
                f"{model.path} has changed since it was loaded: load the model again, or put the file back"
            )
        self.encoder = TextEncoder(self.tokenizer, model.template)
        self._template = model.template
        self._now = datetime.now(UTC)

    def template(self, now: datetime) -> ChatTemplate:
        """The chat template.

        Args:
            now: The local time, for templates that date their system prompt.
        """
        self._now = now
        return self._compiled

    def prompt_ids(self, prompt: str, most_tokens: int | None = None) -> array[int]:
        """Token ids of a rendered prompt, with one BOS where the template and the model both add one."""
        if self.tokenizer.adds_bos:
            prompt = prompt.removeprefix(self.tokenizer.bos)
        return self.encoder.ids(prompt, add_special=True, most_tokens=most_tokens)

    @cached_property
    def _compiled(self) -> ChatTemplate:
        tokenizer = self.tokenizer
        return ChatTemplate(
            self._template,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
            now=lambda: self._now,
            marking=self.encoder.marking,
        )


_texts_of = lru_cache(maxsize=_MOST_MODELS)(ModelTexts)


def do_prompt(
    texts: ModelTexts,
    *,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    ending: str,
    now: str,
    most_tokens: int,
    param: str,
) -> bytes:
    """Token ids of a conversation, as 32-bit integers, and how its answer begins.

    Args:
        texts: The model.
        messages: Messages in the form of chat templates.
        variables: Further variables of the template.
        tools: Functions that the model may call.
        ending: Name of an `Ending`.
        now: The local time, in ISO 8601.
        most_tokens: Positions of a session: what can only be longer is refused before it is counted.
        param: The field that the messages came from, for errors.

    Raises:
        InvalidRequest: If the template rejects them.
        ContextLengthExceeded: If they are far too long.
    """
    template = texts.template(datetime.fromisoformat(now))
    try:
        prompt = template.render(messages, variables, tools=tools, ending=Ending[ending])
        has_one_call = bool(tools) and template.has_one_call
    except InvalidRequest as error:
        # The template reports `messages`, whichever field they came from.
        where = param if error.param in {None, "messages"} else error.param
        raise InvalidRequest(error.message, param=where) from None
    refuse_too_long_text(texts.tokenizer, len(prompt), most_tokens, param=param, what="the prompt")
    ids = texts.prompt_ids(prompt, most_tokens)
    # A mark that the template wrote begins reasoning; of a text that is continued, one in it does, too.
    shown = texts.encoder.marking.unmarked(prompt) if ending == Ending.CONTINUED.name else prompt
    told = {"thought_end": end_of_reasoning(shown), "has_one_call": has_one_call}
    return packed_answer(told, [ids.tobytes()])


def do_ids(texts: ModelTexts, *, given: Sequence[Mapping[str, Any]], most_tokens: int) -> bytes:
    """Token ids of some texts, and how many each has.

    Args:
        texts: The model.
        given: Of each text `text`, `add_special`, `parse_special`, and `param`, the field that it came from.
        most_tokens: Positions of a session: what can only be longer is refused before it is counted.

    Raises:
        InvalidRequest: If a text has a lone surrogate.
        ContextLengthExceeded: If a text has more control tokens than that.
    """
    found = []
    for each in given:
        try:
            require_unicode(each["text"])
            found.append(
                texts.encoder.ids(
                    each["text"],
                    add_special=each["add_special"],
                    parse_special=each["parse_special"],
                    most_tokens=most_tokens,
                )
            )
        except MeshError as error:
            raise type(error)(f"{each['param']}: {error.message}", param=each["param"]) from None
    return packed_answer({"counts": [len(ids) for ids in found]}, [ids.tobytes() for ids in found])


def do_listing(texts: ModelTexts, *, ids: Sequence[int], context_length: int, has_names: bool) -> bytes:
    """The JSON of an answer that lists token ids."""
    name = lru_cache(maxsize=None)(texts.tokenizer.name)
    told = {
        "count": len(ids),
        "max_model_len": context_length,
        "tokens": ids,
        "token_strs": list(map(name, ids)) if has_names else None,
    }
    return packed_answer({}, [json.dumps(told, ensure_ascii=False).encode("utf-8", "backslashreplace")])


def do_text(texts: ModelTexts, *, ids: Sequence[int]) -> bytes:
    """The text of token ids, control tokens left out."""
    text = AnswerText(texts.tokenizer.piece)
    whole = "".join(map(text.push, ids)) + text.flush()
    return packed_answer({}, [whole.encode("utf-8", "backslashreplace")])


def do_check(texts: ModelTexts, *, now: str) -> bytes:
    """Problems of the chat template with this vocabulary; see `template_check`."""
    template = texts.template(datetime.fromisoformat(now))
    problems = problems_of(template, texts.tokenizer, texts.prompt_ids)
    return packed_answer({"problems": problems})


_KINDS: Final[dict[str, Callable[..., bytes]]] = {
    made.__name__.removeprefix("do_"): made for made in (do_prompt, do_ids, do_listing, do_text, do_check)
}


def handle(header: bytes, payload: bytes) -> bytes:
    """The answer to a job; see `text_jobs`."""
    sys.setrecursionlimit(_MOST_CALLS)
    try:
        kind, model, values = unpacked_job(header, payload)
        return _KINDS[kind](_texts_of(model), **values)
    except MeshError as error:
        return packed_error(error)
    except RecursionError:
        return packed_error(InvalidRequest("the request is nested too deeply: send flatter values"))
