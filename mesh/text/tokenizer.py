"""Tokenizer from a GGUF vocabulary, and the comparison of two vocabularies."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidModel, InvalidRequest
from stages.grammar.automaton import TokenTexts
from stages.runtime.bindings import llama_cpp
from stages.runtime.llama import init_backend, last_complaint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

_MAX_PIECE_BYTES: Final = 1024
_NO_TOKEN: Final = -1
_CONTROL: Final = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_NAMED: Final = _CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
_UNUSED: Final = llama_cpp.LLAMA_TOKEN_ATTR_UNUSED
# They drop spaces, and one token may stand for an unknown word of any length.
_LOSSY: Final = frozenset({llama_cpp.LLAMA_VOCAB_TYPE_WPM, llama_cpp.LLAMA_VOCAB_TYPE_UGM})


@dataclass(frozen=True)
class Vocabulary:
    """Texts of a model's token ids."""

    name: str
    """Name of the model, for errors."""
    texts: Sequence[bytes]
    """The text of each id, as the vocabulary spells it."""
    special: Mapping[str, int | None]
    """Special ids, such as `eos`, by name; None if there is none."""
    num_used: int
    """Ids from here on are padding."""


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that llama.cpp makes where its name stands, whatever is around it."""

    token: int
    """Its id."""
    name: str
    """Its name, such as `<|im_end|>`."""
    is_user_defined: bool
    """Whether it is an ordinary part of texts, such as `<table>`: no control token."""
    takes_white_before: bool
    """Whether white space ahead of it is left out."""
    takes_white_behind: bool
    """Whether white space behind it is."""


class Tokenizer:
    """Vocabulary of a GGUF, loaded without its weights (SmolLM2: 0.2 s).

    Thread-safe: llama.cpp only reads a loaded vocabulary, and the piece cache is a dict whose entries never
    change. `encode` releases the interpreter lock.

    Args:
        path: Path of the model, or of its first file if it is split.

    Raises:
        InvalidModel: If llama.cpp cannot read it, or if it has no vocabulary, as most stage files.

    Attributes:
        path: Absolute path of the file.
        stamp: Size in bytes of the file, and its time of change in nanoseconds.
        n_vocab: Number of token ids.
        n_ctx_train: Positions that the model was trained for.
        is_lossless: Whether the tokens of a text hold all of it, as no WordPiece or Unigram vocabulary does.
        end_tokens: Every id that ends an answer.
        bos: Text of the token that begins a sequence, empty if there is none.
        eos: Text of the token that ends a sequence, empty if there is none.
        adds_bos: Whether `encode(…, add_special=True)` begins with that token.
        chat_template: Jinja source, if the model has one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._model = _load_vocabulary(path)
        self.stamp = stamp_of(path)
        weakref.finalize(self, llama_cpp.llama_model_free, self._model)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        kind = llama_cpp.llama_vocab_type(vocab)
        if kind == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise InvalidModel(
                f"{path} has no vocabulary, as it is one stage of a model; give the whole model"
            )
        self.is_lossless = kind not in _LOSSY
        self._is_wordpiece = kind == llama_cpp.LLAMA_VOCAB_TYPE_WPM
        self._vocab = vocab
        self._pieces: dict[int, bytes] = {}
        self._controls: dict[frozenset[str], dict[str, int]] = {}
        self._shown: dict[frozenset[str], dict[int, bytes]] = {}
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self.n_ctx_train = self._n_ctx_train(path)
        self.end_tokens = frozenset(
            token for token in range(self.n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, token)
        )
        self.bos = self._token_text(llama_cpp.llama_vocab_bos(vocab))
        self.eos = self._token_text(llama_cpp.llama_vocab_eos(vocab))
        self.adds_bos: bool = bool(self.bos) and llama_cpp.llama_vocab_get_add_bos(vocab)
        template = llama_cpp.llama_model_chat_template(self._model, None)
        self.chat_template: str | None = template.decode("utf-8", "replace") if template else None

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text.
            add_special: Add the tokens that the model wants around a sequence, such as BOS.
            parse_special: Whether `<|…|>` and the like become the special tokens that they name.

        Raises:
            InvalidRequest: If the text has a lone surrogate, which UTF-8 cannot encode.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has half a surrogate pair at character {error.start}: send valid Unicode"
            ) from None
        room = len(data) + 8
        while True:
            buffer = (llama_cpp.llama_token * room)()
            count = llama_cpp.llama_tokenize(
                self._vocab, data, len(data), buffer, room, add_special, parse_special
            )
            if count >= 0:
                return list(buffer[:count])
            if -count <= room:  # the count would not fit an int32
                raise InvalidRequest(f"a text of {len(data)} bytes is too long for the tokenizer")
            room = -count

    def piece(self, token: int) -> bytes:
        """Bytes of a token: part of a UTF-8 sequence at times, empty for a control token."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token, special=False)
        return piece

    def name(self, token: int) -> str:
        """Name of a token: its piece, or such as `<|im_end|>` for a control token."""
        return self._token_text(token)

    def piece_with(self, marks: Collection[str]) -> Callable[[int], bytes]:
        """`piece`, but with the names of control tokens in these texts with marks.

        Args:
            marks: Such as `<tool_call>`, also several in one text.
        """
        key = frozenset(marks)
        if key not in self._shown:
            self._shown[key] = {token: name.encode() for name, token in self.control_tokens(key).items()}
        shown = self._shown[key]
        if not shown:
            return self.piece
        return lambda token: shown.get(token) or self.piece(token)

    def control_tokens(self, texts: Collection[str]) -> dict[str, int]:
        """Control tokens whose names are in some texts, by their names."""
        key = frozenset(texts)
        if key not in self._controls:
            ids = {
                token for text in key for token in self.encode(text, add_special=False, parse_special=True)
            }
            self._controls[key] = {self.name(token): token for token in sorted(ids) if not self.piece(token)}
        return self._controls[key]

    @cached_property
    def special_tokens(self) -> tuple[SpecialToken, ...]:
        """All tokens that have names."""
        found = []
        for token in range(self.n_vocab):
            attr = llama_cpp.llama_vocab_get_attr(self._vocab, token)
            if not attr & _NAMED:
                continue
            name = llama_cpp.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace")
            if name:
                found.append(
                    SpecialToken(
                        token,
                        name,
                        is_user_defined=not attr & _CONTROL,
                        takes_white_before=bool(attr & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP),
                        takes_white_behind=bool(attr & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP),
                    )
                )
        return tuple(found)

    @cached_property
    def sequence_ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens that the model wants ahead of a sequence, and behind it."""
        both = tuple(self.encode("", add_special=True, parse_special=False))
        num_ahead = min(len(both), int(self._is_wordpiece or llama_cpp.llama_vocab_get_add_bos(self._vocab)))
        return both[:num_ahead], both[num_ahead:]

    @cached_property
    def texts(self) -> TokenTexts:
        """Bytes of every token, for grammars; SmolLM2: 0.1 s at the first call."""
        return TokenTexts(tuple(self.piece(token) for token in range(self.n_vocab)), self.end_tokens)

    @cached_property
    def longest_piece_bytes(self) -> int:
        """Most bytes of one token, control tokens included; SmolLM2: 0.1 s at the first call."""
        return max(len(self._read_piece(token, special=True)) for token in range(self.n_vocab))

    def special_token(self, text: str) -> int | None:
        """The single token of a text such as `<|im_end|>`, if the vocabulary has it."""
        ids = self.encode(text, add_special=False, parse_special=True)
        return ids[0] if len(ids) == 1 else None

    def vocabulary(self) -> Vocabulary:
        """Texts of all token ids, to be compared with another model's."""
        vocab = self._vocab
        texts = [llama_cpp.llama_vocab_get_text(vocab, token) for token in range(self.n_vocab)]
        num_used = self.n_vocab
        while num_used and llama_cpp.llama_vocab_get_attr(vocab, num_used - 1) & _UNUSED:
            num_used -= 1
        special = {
            "bos": llama_cpp.llama_vocab_bos(vocab),
            "eos": llama_cpp.llama_vocab_eos(vocab),
            "eot": llama_cpp.llama_vocab_eot(vocab),
        }
        return Vocabulary(
            name=self.path.name,
            texts=texts,
            special={purpose: None if token == _NO_TOKEN else token for purpose, token in special.items()},
            num_used=num_used,
        )

    def _token_text(self, token: int) -> str:
        return "" if token == _NO_TOKEN else self._read_piece(token, special=True).decode("utf-8", "replace")

    def _read_piece(self, token: int, *, special: bool) -> bytes:
        room = _MAX_PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if size >= 0:
                return buffer.raw[:size]
            room = -size

    def _n_ctx_train(self, path: Path) -> int:
        # Loading the vocabulary alone skips the hyperparameters, but keeps the metadata.
        key = f"{self._metadata('general.architecture')}.context_length"
        value = self._metadata(key)
        if not value.isdecimal():
            raise InvalidModel(f"{path} has no training context length: it lacks {key}")
        return int(value)

    def _metadata(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        size = llama_cpp.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if size >= 0 else ""


def num_shared_tokens(draft: Vocabulary, target: Vocabulary) -> int:
    """Number of ids, from 0, with the same text in both. The rest is padding, which differs within a family.

    Raises:
        InvalidModel: Naming the first id, or the first special token, that differs.
    """
    num_compared = min(len(draft.texts), len(target.texts))
    for token in range(num_compared):
        if draft.texts[token] != target.texts[token]:
            raise _refusal(draft, target, token)
    if max(draft.num_used, target.num_used) > num_compared:
        raise _refusal(draft, target, num_compared)
    for purpose, meant in target.special.items():
        said = draft.special.get(purpose)
        if said != meant:
            raise InvalidModel(
                f"{draft.name} cannot draft for {target.name}: {purpose} is token {said} in the draft, "
                f"{meant} in the target; make a draft with `mesh draft make`"
            )
    return num_compared


def _refusal(draft: Vocabulary, target: Vocabulary, token: int) -> InvalidModel:
    return InvalidModel(
        f"{draft.name} cannot draft for {target.name}: token {token} is {_spelled(draft, token)} in the "
        f"draft, {_spelled(target, token)} in the target; make a draft with `mesh draft make`"
    )


def _spelled(vocabulary: Vocabulary, token: int) -> str:
    if token >= len(vocabulary.texts):
        return f"missing (it has {len(vocabulary.texts)} tokens)"
    return repr(vocabulary.texts[token].decode("utf-8", "replace"))


def stamp_of(path: Path) -> tuple[int, int]:
    """Size in bytes of a file, and its time of change in nanoseconds."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _load_vocabulary(path: Path) -> llama_cpp.llama_model_p:
    if not path.is_file():
        raise InvalidModel(f"{path} is not a file: give the path of a GGUF model")
    init_backend()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise InvalidModel(f"{path} is not a GGUF model that llama.cpp can read: {last_complaint()}")
    return model
