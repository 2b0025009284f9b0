"""Token ids of prompts: control tokens where a template wrote their names, letters where a client did.

llama.cpp splits a text at the names of its special tokens in time that grows with the square of their number,
and makes tokens of all of them, those in a user's text too. So a text is split here, in linear time, and
llama.cpp gets the pieces between. Its own rules are followed, so that the ids are the same
(`llama_vocab::impl::tokenize` and `tokenizer_st_partition`).
"""

from __future__ import annotations

import re
import threading
from array import array
from typing import TYPE_CHECKING, Final

from mesh.text.answer_format import MARKS
from mesh.text.client_text import Marking, alternatives
from spanmesh_proto.errors import too_long

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mesh.text.tokenizer import SpecialToken, Tokenizer

# What C's `isspace` takes for white space.
_WHITE: Final = " \t\n\v\f\r"
_WHITE_AHEAD: Final = re.compile(f"[{_WHITE}]*")
# Most vocabularies are split by `std::regex`, which calls itself for each character of a word and takes 300
# bytes for each with libstdc++ (measured). Only what is used of a stack takes memory.
_STACK_BYTES_PER_CHAR: Final = 640
_STACK_BYTES: Final = 16 * 2**20
# From here on a smaller stack is worth looking for long words.
_MANY_CHARS: Final = 2**17
# Names that are given to marks of turns, and to nothing else.
_MARK_SHAPE: Final = re.compile(r"(?is)<\|.+\|>|<｜.+｜>|\W.*(?:user|assistant|system).*\W")
# Below this number of characters per position tokenizing is cheap, and most texts have fewer.
_SUSPICIOUS: Final = 8
_WHITE_RUN: Final = re.compile(r"\s{64,}")
# Stack for a text of some thousand characters. Main threads have 8 MiB, most others at least 2.
_ORDINARY_BYTES: Final = _STACK_BYTES + _STACK_BYTES_PER_CHAR * 2048


class TextEncoder:
    """Token ids of texts, of one vocabulary.

    Args:
        tokenizer: The vocabulary.
        template: Jinja source of its chat template: user-defined tokens that it names are marks.

    Attributes:
        marking: Tells texts of clients from what a template writes.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "") -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_tokens
        marks = [each for each in special if not each.is_user_defined or _is_mark(each.name, template)]
        self.marking = Marking(each.name for each in marks)
        self._marks = _Finder(marks)
        # llama.cpp makes these of letters, too.
        self._user_marks = _Finder([each for each in marks if each.is_user_defined])

    def ids(
        self,
        text: str,
        *,
        add_special: bool,
        parse_special: bool = True,
        most_tokens: int | None = None,
    ) -> array[int]:
        """Token ids of a text, 32 bits each.

        Args:
            text: Any text; in one with stand-ins of `marking`, what clients wrote makes no control token.
            add_special: Add the tokens that the model wants around a sequence, such as BOS.
            parse_special: Whether names of control tokens make them at all.
            most_tokens: Most ids that are of use; more control tokens than that are refused at once.

        Raises:
            InvalidRequest: If the text has a lone surrogate.
            ContextLengthExceeded: If it has more control tokens than `most_tokens`.
            MemoryError: If it has a word for which there is no stack.
        """
        before, after = self._tokenizer.sequence_ends if add_special else ((), ())
        found = array("i", before)
        if not parse_special:
            found.extend(self._of_letters(self.marking.unmarked(text)))
            found.extend(after)
            return found
        pieces = list(self._marks.pieces(text))
        num_special = sum(not isinstance(piece, str) for piece in pieces)
        if most_tokens is not None and num_special > most_tokens:
            raise too_long(
                num_special,
                most_tokens,
                "that many are control tokens alone, send less",
                what="your text",
                most=most_tokens,
                is_least=True,
            )
        for piece in pieces:
            if isinstance(piece, str):
                found.extend(self._of_letters(self.marking.unmarked(piece)))
            else:
                found.append(piece.token)
        found.extend(after)
        return found

    def _of_letters(self, text: str) -> Iterable[int]:
        """Ids of a text that holds no control token; its user-defined marks are letters."""
        parts = self._broken(text)
        found = self._encoded(parts[0])
        for part in parts[1:]:
            found.extend(self._continued(part))
        return found

    def _broken(self, text: str) -> list[str]:
        """The text divided behind the first letter of each user-defined mark, so that none is whole."""
        cuts = [start + 1 for start in self._user_marks.places(text)]
        return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _continued(self, text: str) -> Sequence[int]:
        """Ids of a text that goes on: without the space that some vocabularies put ahead of each piece."""
        ahead = self._encoded("\n")
        found = self._encoded(f"\n{text}")
        return found[len(ahead) :] if found[: len(ahead)] == ahead else self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        if not text:
            return []
        return with_stack(
            _stack_bytes(text),
            lambda: self._tokenizer.encode(text, add_special=False, parse_special=False),
        )


class _Finder:
    """Finds the names of tokens in texts, the longest where several begin, in one pass.

    Args:
        tokens: The tokens.
    """

    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        self._by_name: dict[str, SpecialToken] = {}
        for each in tokens:
            self._by_name.setdefault(each.name, each)
        self._pattern = re.compile(alternatives(self._by_name)) if self._by_name else None

    def places(self, text: str) -> Iterator[int]:
        """Positions where names begin."""
        if self._pattern is not None:
            for found in self._pattern.finditer(text):
                yield found.start()

    def pieces(self, text: str) -> Iterator[str | SpecialToken]:
        """The tokens and the texts between them, none empty; some tokens take the white space beside them."""
        at = 0
        for found in () if self._pattern is None else self._pattern.finditer(text):
            if found.start() < at:
                continue
            token = self._by_name[found[0]]
            before = text[at : found.start()]
            if token.takes_white_before:
                before = before.rstrip(_WHITE)
            if before:
                yield before
            yield token
            at = found.end()
            if token.takes_white_behind:
                white = _WHITE_AHEAD.match(text, at)
                at = at if white is None else white.end()
        if at < len(text):
            yield text[at:]


def refuse_too_long_text(
    tokenizer: Tokenizer, num_chars: int, context_length: int, *, param: str, what: str
) -> None:
    """Check that a text could fit the context, by the longest token of the vocabulary.

    Texts that pass are counted exactly later; no text that fits is refused.

    Args:
        tokenizer: Tokenizer of the served model.
        num_chars: Length of the text.
        context_length: Positions of a session.
        param: The field that the text came from.
        what: Name of the text, for the error.

    Raises:
        ContextLengthExceeded: With the numbers.
    """
    if not tokenizer.is_lossless or num_chars <= _SUSPICIOUS * context_length:
        return
    least_tokens = -(-num_chars // tokenizer.longest_piece_bytes)
    if least_tokens >= context_length:
        raise too_long(
            least_tokens,
            context_length,
            f"it has {num_chars} characters, send less, or serve the model with a larger --ctx-size",
            what=what,
            most=context_length - 1,
            is_least=True,
            param=param,
        )


def _is_mark(name: str, template: str) -> bool:
    """Whether a user-defined token is one that a template or a parser of answers takes for a mark.

    Others, such as those of Gemma for line breaks and for HTML, are parts of texts.
    """
    has_brackets = not (name[0].isalnum() or name[0].isspace() or name[-1].isalnum() or name[-1].isspace())
    if name in MARKS:
        return True
    # Templates also put names together, of roles for instance: those need not be in their source.
    is_named_so = name in template or _MARK_SHAPE.fullmatch(name) is not None
    return has_brackets and any(map(str.isalpha, name)) and is_named_so


def _stack_bytes(text: str) -> int:
    """Stack for a text, by the longest stretch that the patterns of vocabularies can match at once.

    No pattern matches more than one line, with white space and line breaks around it.
    """
    num_chars = len(text)
    if num_chars > _MANY_CHARS:
        line = max(map(len, text.split("\n")))
        white = max((found.end() - found.start() for found in _WHITE_RUN.finditer(text)), default=64)
        num_chars = min(num_chars, line + 2 * white)
    return _STACK_BYTES + _STACK_BYTES_PER_CHAR * num_chars


def with_stack(stack_bytes: int, compute: Callable[[], list[int]]) -> list[int]:
    """Compute in a thread with such a stack, unless the main thread's is enough.

    Raises:
        MemoryError: If the system has no memory for it.
    """
    if stack_bytes <= _ORDINARY_BYTES:
        return compute()
    found: list[list[int]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(compute())
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    before_bytes = threading.stack_size(-(-stack_bytes // 2**12) * 2**12)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    except RuntimeError as error:
        raise MemoryError from error
    finally:
        threading.stack_size(before_bytes)
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
