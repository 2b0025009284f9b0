"""Random models about which drafters are often right: heads for multi-token prediction, or random drafters.

What a random model says next hardly depends on anything before its last token, if its layers add little to
the embedding. A head that passes the embedding on then says nearly the same. Both still compute all that they
have, and a wrong state or feature changes what follows. In float32, since rounding to few bits makes
differences in the order of summation large enough to change a token now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np

from stages.slicing.tensor_names import EMBEDDING, OUTPUT, layer_of
from tests.support.gguf_source import GgufSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gguf.constants import GGMLQuantizationType
    from numpy.typing import NDArray

    from tests.support.gguf_source import SourceTensor

# What a layer adds to the hidden states comes out of these.
_OUTPUTS: Final = (
    "attn_output.weight",
    "ffn_down.weight",
    "ffn_down_exps.weight",
    "ffn_down_shexp.weight",
    "ssm_out.weight",
)
# It reads an embedding, then a head state, each normalised.
_JOIN: Final = "nextn.eh_proj.weight"
# Factors of a head's weights. What other tokens get is no tie: a choice among equals would be anyone's.
_LIKELY: Final = 3.0
_UNLIKELY: Final = 0.1
# The token that ends an answer in `add_vocabulary`'s vocabularies. It is never the likeliest one.
_END: Final = 2


def make_predictable(path: Path, *, share: float) -> Path:
    """Change a model's weights, and write them in float32.

    Args:
        path: A model with a layer for multi-token prediction; its file is written anew.
        share: What is left of what each layer adds, and of the head state that the head reads; embeddings
            have 1 as the mean of their squares.
    """

    def change(tensor: SourceTensor) -> tuple[NDArray[np.float32], None]:
        name = tensor.name.removeprefix(f"blk.{layer_of(tensor.name)}.")
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return _changed(name, weights, share), None

    return _written_again(path, change)


def make_terse(path: Path, tokens: Sequence[int]) -> Path:
    """Make few tokens likely and all others unlikely: random drafters with the same head are right at times.

    Args:
        path: A model with a head of its own; its file is written anew.
        tokens: Ids of the likely ones.
    """

    def change(tensor: SourceTensor) -> tuple[NDArray[Any], GGMLQuantizationType]:
        if tensor.name != OUTPUT:
            return tensor.data, tensor.tensor_type
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        factors = np.full((len(weights), 1), _UNLIKELY, np.float32)
        factors[list(tokens)] = _LIKELY
        return gguf.quants.quantize(weights * factors, tensor.tensor_type), tensor.tensor_type

    return _written_again(path, change)


def _written_again(
    path: Path, change: Callable[[SourceTensor], tuple[NDArray[Any], GGMLQuantizationType | None]]
) -> Path:
    source = GgufSource(path)
    scratch = path.with_suffix(".scratch")
    writer = gguf.GGUFWriter(scratch, source.header.architecture)
    source.copy_metadata(writer, lambda _key: True)
    for tensor in source.tensors.values():
        data, dtype = change(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scratch.rename(path)
    return path


def _changed(name: str, weights: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    if name == EMBEDDING:
        return weights / np.float32(np.sqrt(np.mean(weights**2)))
    if name == OUTPUT:
        weights[_END] = 0.0
        return weights
    if name == _JOIN:
        # The embedding as it is.
        return share * weights + np.eye(*weights.shape, dtype=np.float32)
    return share * weights if name in _OUTPUTS else weights
