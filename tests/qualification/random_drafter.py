"""Random drafters with the sizes that trained ones have, for measurements of what their drafts cost.

They compute like trained ones, and hardly ever say what the model says. Drafters of blocks have five layers
as wide as the model's own, which read five layers of the model, as z-lab's DFlash drafters do. No Gemma 4 is
small enough for it: a random one with the sizes and the vocabulary of the demo's model is written here, too,
and its assistant in the proportions of the 12B's.

    python -m tests.qualification.random_drafter dspark dspark.gguf --for MODEL.gguf
    python -m tests.qualification.random_drafter gemma4 gemma4.gguf
    python -m tests.qualification.random_drafter assistant assistant.gguf --for gemma4.gguf
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np

from mesh.serve.options import demo_model
from speculative.proposer import DrafterKind
from stages.gguf import read_header
from tests.qualification.own_models import gemma4_of
from tests.support.assistant_files import WINDOWS, write_assistant
from tests.support.block_drafters import BlockDrafter
from tests.support.gemma4_shape import Gemma4Shape

if TYPE_CHECKING:
    from tests.support.tiny_families import Noise, Tensors

_KINDS: Final = (DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2, DrafterKind.ASSISTANT)
_NUM_LAYERS: Final = 5
_BLOCK_SIZE: Final = 16
_GEMMA4: Final = "gemma4"
# Of the 12B: layers with and without a window, and its assistant's width inside over its width.
_GROUP: Final = (True, True, True, True, True, False)
_WINDOW: Final = 1024
_FF_FACTOR: Final = 8
# Rows of Q8_0 are multiples of this.
_ROW: Final = 32
# Of the embeddings: with larger ones, which are the head as well, a random model repeats its last token.
_EMBEDDING_SCALE: Final = 0.1


class _Sizes:
    """Sizes that a model's metadata says."""

    def __init__(self, model: Path) -> None:
        self._header = read_header(model)
        self.architecture = self._header.architecture
        self.n_vocab = self._header.metadata["tokenizer.ggml.tokens"].count or 0

    def __getitem__(self, name: str) -> int:
        return int(self.value(name))

    def value(self, name: str) -> Any:
        """A value below the architecture's name."""
        return self._header.metadata[f"{self.architecture}.{name}"].decode()


def trained_shape(kind: DrafterKind, target: Path) -> BlockDrafter:
    """A drafter of blocks for a model, with layers of its size."""
    sizes = _Sizes(target)
    # From the second layer to the last but one, which have the inputs of those behind them.
    reads = np.linspace(2, sizes["block_count"] - 2, _NUM_LAYERS).round().astype(int)
    return BlockDrafter(
        kind,
        n_layers=_NUM_LAYERS,
        block_size=_BLOCK_SIZE,
        reads=tuple(dict.fromkeys(int(layer) for layer in reads)),
        n_heads=sizes["attention.head_count"],
        n_heads_kv=sizes["attention.head_count_kv"],
        head_size=sizes["embedding_length"] // sizes["attention.head_count"],
        n_ff=sizes["feed_forward_length"],
    )


def gemma4_shape(model: Path) -> Gemma4Shape:
    """A dense Gemma 4 with about as many weights as a model without windows."""
    sizes = _Sizes(model)
    head = sizes["embedding_length"] // sizes["attention.head_count"]
    return Gemma4Shape(
        _GROUP * max(1, sizes["block_count"] // len(_GROUP)),
        n_embd=sizes["embedding_length"],
        n_ff=sizes["feed_forward_length"],
        heads=sizes["attention.head_count"],
        narrow=head,
        narrow_kv=sizes["attention.head_count_kv"],
        broad=2 * head,
        window=_WINDOW,
        narrow_base=1e4,
        broad_base=1e6,
        n_ctx=sizes["context_length"],
    )


def assistant_shape(model: Path) -> Gemma4Shape:
    """The assistant of a Gemma 4: about a quarter as wide, with as many heads and the same keys."""
    sizes = _Sizes(model)
    width = -(-sizes["embedding_length"] // (4 * _ROW)) * _ROW
    # The last two layers, whose keys it reads: with a window and without.
    narrow_kv, broad_kv = sizes.value("attention.head_count_kv")[-2:]
    return Gemma4Shape(
        WINDOWS,
        n_embd=width,
        n_ff=_FF_FACTOR * width,
        heads=sizes["attention.head_count"],
        narrow=sizes["attention.key_length_swa"],
        narrow_kv=narrow_kv,
        broad=sizes["attention.key_length"],
        broad_kv=broad_kv,
        window=sizes["attention.sliding_window"],
        narrow_base=sizes.value("rope.freq_base_swa"),
        broad_base=sizes.value("rope.freq_base"),
        n_ctx=sizes["context_length"],
    )


def write_gemma4(like: Path, path: Path) -> None:
    """Write a random Gemma 4 with sizes and vocabulary of a model."""
    shape, n_vocab = gemma4_shape(like), _Sizes(like).n_vocab
    family = gemma4_of(shape)

    def outside(noise: Noise) -> Tensors:
        embedding = noise.matrix(n_vocab, shape.n_embd) * np.float32(_EMBEDDING_SCALE)
        return family.outside(noise) | {"token_embd.weight": embedding}

    replace(family, outside=outside, n_vocab=n_vocab, vocabulary=like).write(path)


def write_drafter(kind: str, path: Path, target: Path) -> None:
    """Write a file for a model.

    Args:
        kind: `gemma4`, or the kind of a drafter.
        path: Where to.
        target: The model that it drafts for, or that it is as large as.

    Raises:
        click.UsageError: If an assistant is wanted for another model than a Gemma 4.
    """
    if kind == _GEMMA4:
        write_gemma4(target, path)
    elif kind == DrafterKind.ASSISTANT.value:
        if _Sizes(target).architecture != _GEMMA4:
            raise click.UsageError("an assistant drafts for a Gemma 4; name it with --for")
        write_assistant(path, shape=assistant_shape(target), target=target)
    else:
        trained_shape(DrafterKind[kind.upper()], target).write(target, path)


@click.command()
@click.argument("kind", type=click.Choice([*(kind.value for kind in _KINDS), _GEMMA4]))
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--for",
    "target",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The model; the demo's unless given. A gemma4 gets its sizes and its vocabulary.",
)
def main(kind: str, path: Path, target: Path | None) -> None:
    """Write a random drafter of KIND, or a random Gemma 4, to PATH."""
    write_drafter(kind, path, target or demo_model())


if __name__ == "__main__":
    main()
