"""Process for texts of clients: renders and checks chat templates, makes token ids of texts and texts of ids.

All native code that sees what clients send runs here, and so do templates, which are programs out of a file:
a text that ends this process ends no answer but its own. It has nothing of the head's environment, can write
no file and holds no secret; see `mesh.util.worker_main` for its bounds.

The functions whose names begin with `do_` are the kinds of jobs. Vocabularies stay loaded, the latest few.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mesh.text.answer_format import (
    AnswerFormat,
    Marks,
    end_of_reasoning,
    has_ended_reasoning,
    unended_reasoning,
)
from mesh.text.chat_template import ChatTemplate, Ending
from mesh.text.client_text import require_unicode
from mesh.text.detokenizer import AnswerText
from mesh.text.known_formats import has_short_ids
from mesh.text.reasoning_switches import ReasoningSwitches, ReasoningWish
from mesh.text.text_encoder import TextEncoder, refuse_too_long_text
from mesh.text.text_jobs import unpacked_job
from mesh.text.tokenizer import Tokenizer
from mesh.util.worker_answers import packed_answer, packed_error
from spanmesh_proto.errors import InvalidRequest, MeshError, ModelError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mesh.text.text_jobs import TextModel

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
        return self.ids_around(prompt, (), most_tokens)[0]

    def ids_around(
        self, prompt: str, gaps: Sequence[str], most_tokens: int | None
    ) -> tuple[array[int], list[tuple[int, int]]]:
        """Token ids of a rendered prompt with gaps, between which it is tokenized piece by piece.

        So does llama.cpp around pictures (`mtmd_tokenize`).

        Args:
            prompt: The prompt, with stand-ins.
            gaps: Texts of letters and digits that stand in it, and are no part of it.
            most_tokens: See `TextEncoder.ids`.

        Returns:
            The ids, and of each gap in the prompt its index and the number of ids ahead of it.
        """
        if self.tokenizer.adds_bos:
            prompt = prompt.removeprefix(self.tokenizer.bos)
        before, after = self.tokenizer.sequence_ends
        found, places, at = array("i", before), [], 0
        shown = self.encoder.marking.unmarked(prompt)
        for gap in re.finditer("|".join(gaps), shown) if gaps else ():
            found.extend(self._ids(prompt[at : gap.start()], most_tokens))
            places.append((gaps.index(gap[0]), len(found)))
            at = gap.end()
        found.extend(self._ids(prompt[at:], most_tokens))
        found.extend(after)
        return found, places

    def _ids(self, piece: str, most_tokens: int | None) -> array[int]:
        return self.encoder.ids(piece, add_special=False, most_tokens=most_tokens)

    @cached_property
    def _compiled(self) -> ChatTemplate:
        tokenizer = self.tokenizer
        return ChatTemplate(
            self._template,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
            now=lambda: self._now,
            ends=[tokenizer.name(token) for token in sorted(tokenizer.end_tokens)],
            marking=self.encoder.marking,
        )


_texts_of = lru_cache(maxsize=_MOST_MODELS)(ModelTexts)


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
    reasoning: Mapping[str, Any] | None = None,
    marks: Sequence[Mapping[str, str]] | None = None,
    gaps: Sequence[str] = (),
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
        reasoning: Fields of a `ReasoningWish`, which `variables` go before.
        marks: Fields of the `Marks` of reasoning, if they are known.
        gaps: Texts within the messages, of letters and digits, in whose places something else will be.

    Raises:
        InvalidRequest: If the template rejects them, or does not show each gap once.
        ContextLengthExceeded: If they are far too long.
    """
    template = texts.template(datetime.fromisoformat(now))
    try:
        wish = ReasoningWish(**(reasoning or {}))
        switches = ReasoningSwitches() if wish == ReasoningWish() else template.reasoning_switches
        variables = {**switches.variables(wish), **variables}
        prompt = template.render(messages, variables, tools=tools, ending=Ending[ending])
        has_one_call = bool(tools) and template.has_one_call
    except InvalidRequest as error:
        # The template reports `messages`, whichever field they came from.
        where = param if error.param in {None, "messages"} else error.param
        raise InvalidRequest(error.message, param=where) from None
    num_chars = len(prompt) - sum(map(len, gaps))
    refuse_too_long_text(texts.tokenizer, num_chars, most_tokens, param=param, what="the prompt")
    ids, places = texts.ids_around(prompt, gaps, most_tokens)
    if sorted(gap for gap, _ in places) != list(range(len(gaps))):
        raise InvalidRequest(
            "the model's chat template does not show each picture once: send them in messages of the user",
            param=param,
        )
    # A mark that the template wrote begins reasoning; of a text that is continued, one in it does, too.
    shown = texts.encoder.marking.unmarked(prompt) if ending == Ending.CONTINUED.name else prompt
    reasoning_marks = (
        template.answer_format.reasoning if marks is None else tuple(Marks(**each) for each in marks)
    )
    said = messages[-1]["content"] if ending == Ending.CONTINUED.name else ""
    told = {
        "thought_end": end_of_reasoning(shown, reasoning_marks) or unended_reasoning(said, reasoning_marks),
        "may_think": ending == Ending.ANSWER.name and not has_ended_reasoning(shown, reasoning_marks),
        "has_one_call": has_one_call,
        "knows_reasoning": switches.has_any,
        "knows_budget": switches.has_budget,
        "places": places,
    }
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


def do_format(texts: ModelTexts, *, now: str) -> bytes:
    """Format of the model's answers, and whether ids of calls must be short ones."""
    template = texts.template(datetime.fromisoformat(now))
    try:
        found = template.answer_format
        needs_short_ids = template.has_short_ids or has_short_ids(found.calls)
    except RequestError:
        # It renders nothing: the check has told so.
        found, needs_short_ids = AnswerFormat(), False
    return packed_answer({"format": found.told(), "has_short_ids": needs_short_ids})


_KINDS: Final[dict[str, Callable[..., bytes]]] = {
    made.__name__.removeprefix("do_"): made
    for made in (do_prompt, do_ids, do_listing, do_text, do_check, do_format)
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
