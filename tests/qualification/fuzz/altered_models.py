"""Copies of a model with other metadata, fewer layers, or the vocabulary alone."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from stages.gguf import Value, ValueType, read_header
from stages.layers import LayerRange
from stages.slicing.layout import StageLayout, lay_out
from stages.slicing.source_model import read_source
from tests.qualification.fuzz.gguf_fuzz import write_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PRE_KIND: Final = "tokenizer.ggml.pre"
TEMPLATE: Final = "tokenizer.chat_template"
_TOKENS: Final = "tokenizer.ggml.tokens"
_WORD_TYPES: Final = "tokenizer.ggml.token_type"
_CONTROL: Final = 3  # llama.cpp's type of control tokens
_NORMAL: Final = 1


def write_altered(
    source: Path, output: Path, changes: Mapping[str, Value | None], *, num_layers: int | None = None
) -> Path:
    """Write a whole model like another one.

    Args:
        source: The model.
        output: The file to write.
        changes: New values by metadata key; None leaves the key out.
        num_layers: How many of the first layers to keep; None keeps all.

    Returns:
        The file.

    Raises:
        ModelError: If the source is not a whole model, or the file cannot be written.
    """
    model = read_source(source)
    stop = model.n_layers if num_layers is None else min(num_layers, model.n_layers)
    layout = lay_out(model, LayerRange(0, stop))
    own = {key: value for key, value in model.header.metadata.items() if key.startswith("tokenizer.")}
    kept = {key: value for key, value in layout.metadata.items() if not key.startswith("spanmesh.")}
    write_layout(source, replace(layout, metadata=_changed({**kept, **own}, changes)), output)
    return output


def write_vocabulary(source: Path, output: Path, changes: Mapping[str, Value | None]) -> Path:
    """Write the metadata of another model, without its tensors: enough to load its vocabulary.

    Args:
        source: The model, or a file of a vocabulary alone.
        output: The file to write.
        changes: New values by metadata key; None leaves the key out.

    Returns:
        The file.

    Raises:
        ModelError: If the source is no GGUF file, or the file cannot be written.
    """
    header = read_header(source)
    layout = StageLayout(header.alignment, _changed(header.metadata, changes), ())
    write_layout(source, layout, output)
    return output


def _changed(metadata: Mapping[str, Value], changes: Mapping[str, Value | None]) -> dict[str, Value]:
    merged: dict[str, Value | None] = {**metadata, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def text_value(text: str) -> Value:
    """A text of the metadata."""
    return Value.of(ValueType.STRING, text)


def text_array(texts: Sequence[str]) -> Value:
    """An array of texts."""
    encoded = [text.encode() for text in texts]
    payload = b"".join(struct.pack("<Q", len(data)) + data for data in encoded)
    return Value(ValueType.STRING, len(texts), payload)


def with_control_tokens(source: Path, names: Sequence[str]) -> dict[str, Value]:
    """Changes that make each of these names a control token of a vocabulary, in place of its last words.

    Args:
        source: A file with the vocabulary.
        names: Such as `<|im_end|>`; those that the vocabulary has become control tokens where they are.

    Raises:
        ModelError: If the source is no GGUF file.
        KeyError: If it has no list of tokens and their types.
    """
    metadata = read_header(source).metadata
    tokens = [str(token) for token in _entries(metadata[_TOKENS])]
    kinds = [int(kind) for kind in _entries(metadata[_WORD_TYPES])]
    places = {token: place for place, token in enumerate(tokens)}
    free = iter([place for place in reversed(range(len(tokens))) if kinds[place] == _NORMAL])
    for name in names:
        place = places.get(name)
        if place is None:
            place = next(free)
            tokens[place] = name
        kinds[place] = _CONTROL
    return {_TOKENS: text_array(tokens), _WORD_TYPES: Value.array(ValueType.INT32, tuple(kinds))}


def _entries(value: Value) -> tuple[int | float | bool | str, ...]:
    decoded = value.decode()
    return decoded if isinstance(decoded, tuple) else (decoded,)


def control_tokens(source: Path) -> list[str]:
    """Names of a vocabulary's control tokens.

    Args:
        source: A file with the vocabulary.

    Raises:
        ModelError: If the source is no GGUF file.
        KeyError: If it has no list of tokens and their types.
    """
    metadata = read_header(source).metadata
    kinds = _entries(metadata[_WORD_TYPES])
    return [
        str(token) for token, kind in zip(_entries(metadata[_TOKENS]), kinds, strict=True) if kind == _CONTROL
    ]
