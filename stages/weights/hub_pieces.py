"""Pieces of a stage straight from the hub that the model came from, over several connections."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stages.weights.http_range import read_range
from stages.weights.sent_pieces import SentPieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stages.weights.assembly import Assembly

_NUM_CONNECTIONS: Final = 4
# Of one request: enough that asking does not matter, little enough that all connections have work to the end.
_MOST_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True)
class HubFile:
    """A file of a model at a hub.

    Attributes:
        url: Where, at a revision that does not change.
        size_bytes: Its size.
    """

    url: str
    size_bytes: int


def fetch_from_hub(
    assembly: Assembly, files: Sequence[HubFile], on_bytes: Callable[[int], None]
) -> list[int]:
    """Fetch what is missing and lies in a row there; the rest would take a request for each row.

    Args:
        assembly: Gets the pieces.
        files: The model's, in the order that the recipe counts them.
        on_bytes: Called with the number of bytes that just came, from several threads; may raise.

    Returns:
        Indices of the pieces that did not have their hash.

    Raises:
        HubUnavailable: If the hub refuses or does not answer.
        OSError: If the assembly cannot be written.
    """

    def fetch(indices: list[int]) -> list[int]:
        pieces = [assembly.recipe.pieces[index] for index in indices]
        sent = SentPieces(assembly, indices)

        def take(data: bytes) -> None:
            sent.take(data)
            on_bytes(len(data))

        num_bytes = sum(piece.num_bytes for piece in pieces)
        read_range(files[pieces[0].region.file].url, pieces[0].file_offset, num_bytes, take)
        return sent.wrong

    pool = ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="hub")
    try:
        tasks = [pool.submit(fetch, stretch) for stretch in _stretches(assembly)]
        return [index for task in tasks for index in task.result()]
    finally:
        pool.shutdown(cancel_futures=True)


def has_hub_pieces(assembly: Assembly) -> bool:
    """Whether anything is missing that `fetch_from_hub` fetches."""
    return bool(_wanted(assembly))


def _wanted(assembly: Assembly) -> list[int]:
    pieces = assembly.recipe.pieces
    return [index for index in assembly.missing if pieces[index].region.is_whole]


def _stretches(assembly: Assembly) -> Iterator[list[int]]:
    """Missing pieces that follow one another in one file of the model."""
    pieces = assembly.recipe.pieces
    stretch: list[int] = []
    num_bytes = 0
    for index in sorted(
        _wanted(assembly), key=lambda each: (pieces[each].region.file, pieces[each].file_offset)
    ):
        piece = pieces[index]
        if stretch:
            last = pieces[stretch[-1]]
            stop = last.file_offset + last.num_bytes
            follows = (last.region.file, stop) == (piece.region.file, piece.file_offset)
            if not follows or num_bytes >= _MOST_BYTES:
                yield stretch
                stretch, num_bytes = [], 0
        stretch.append(index)
        num_bytes += piece.num_bytes
    if stretch:
        yield stretch
