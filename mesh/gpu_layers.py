"""How many of a stage's layers its host's GPUs are to hold, as the user says it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.gpu import Gpu

ALL: Final = -1
"""Every layer, however many there are; llama.cpp says it the same way."""

_WORDS: Final[dict[str, int | None]] = {"auto": None, "all": ALL, "none": 0}


def parse_gpu_layers(text: str) -> int | None:
    """A number, or `all`, `none` or `auto`.

    Returns:
        How many, `ALL` for all, None for as many as there is room for.

    Raises:
        ClusterError: If it is none of these.
    """
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    if not word.isdecimal():
        raise ClusterError(f"{text!r} is no number of layers; write one, or all, none or auto")
    return int(word)


def format_gpu_layers(wanted: int | None) -> str:
    """As the user would write it."""
    return next((word for word, number in _WORDS.items() if number == wanted), str(wanted))


def check_gpu_layers(wanted: int | None, gpus: Sequence[Gpu], *, is_exact: bool = False) -> None:
    """Refuse to promise what cannot be had.

    Args:
        wanted: By the user.
        gpus: Of this host.
        is_exact: Whether texts are to be the same however they are computed.

    Raises:
        ClusterError: If layers are to go to a GPU and there is none, or exactness is promised.
    """
    if not wanted:
        return
    if is_exact:
        raise ClusterError(
            f"--exact computes on processors alone, where it is measured; --gpu-layers "
            f"{format_gpu_layers(wanted)} asks for a GPU: leave one of the two out",
            param="--gpu-layers",
        )
    if not gpus:
        raise ClusterError(
            f"--gpu-layers {format_gpu_layers(wanted)}: llama.cpp finds no GPU here; build it for one "
            "(CMAKE_ARGS='-DGGML_CUDA=ON' pip install --no-binary llama-cpp-python llama-cpp-python), or "
            "leave it out",
            param="--gpu-layers",
        )
