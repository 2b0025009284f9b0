"""Reader of pictures that clients send: bounds, the processes that decode them, and errors."""

from __future__ import annotations

from functools import cache
from typing import Final

from mesh.util.worker_pool import WorkerEnded, WorkerPool
from mesh.vision.picture_frames import ANSWER, JOB, MOST_BYTES, MOST_PIXELS
from spanmesh_proto.errors import InvalidRequest, ProtocolError
from stages.vision.picture import Picture

_NUM_WORKERS: Final = 2
# 16 megapixels took 0.2 to 0.8 s of computing, by format, and at most 520 MiB, on an AMD EPYC. The clock goes
# on while others compute.
_CPU_LIMIT_S: Final = 5.0
_WALL_LIMIT_S: Final = 30.0

_MEMORY_BYTES: Final = 2**30


class PictureReader:
    """Decodes pictures, each in a confined process that ends with what damages it.

    Args:
        pool: Processes with `mesh.vision.picture_worker`; those of this process if left out.
    """

    def __init__(self, pool: WorkerPool | None = None) -> None:
        self._pool = pool

    async def read(
        self, data: bytes, *, client: str | None = None, most_side: int = 0, param: str | None = None
    ) -> Picture:
        """The pixels of a picture.

        Args:
            data: Bytes of a PNG, JPEG, WebP or GIF, of which the first frame counts.
            client: Client of the request, for fair turns.
            most_side: Pixels of the longer side to which it is scaled down; 0 for as it is.
            param: The request's field with the picture, for errors.

        Raises:
            InvalidRequest: If it is no such picture, is damaged, too large or too long a strip, or takes too
                much to decode.
            Overloaded: If too many pictures wait.
            ProtocolError: If the answer is none.
        """
        if len(data) > MOST_BYTES:
            raise InvalidRequest(
                f"the picture has {len(data)} bytes, {MOST_BYTES} are the most: scale it down", param=param
            )
        pool = self._pool or shared_picture_pool()
        try:
            answer = await pool.run(JOB.pack(most_side), data, client=client)
        except WorkerEnded as end:
            raise InvalidRequest(
                f"the picture {end.reason} while it was decoded: send it scaled down, as PNG or JPEG",
                param=param,
            ) from None
        width, height = ANSWER.unpack_from(answer)
        # Megabytes, which are not copied.
        rest = memoryview(answer)[ANSWER.size :]
        if not width:
            raise InvalidRequest(f"the picture {str(rest, 'utf-8', 'replace')}", param=param)
        if width * height > MOST_PIXELS:
            raise ProtocolError(f"the process for pictures answered with {width} × {height} pixels")
        return Picture(width, height, rest)


@cache
def shared_picture_pool() -> WorkerPool:
    """The processes for pictures of all models, started with the first picture; they end with this one."""
    return WorkerPool(
        "mesh.vision.picture_worker",
        num_workers=_NUM_WORKERS,
        cpu_limit_s=_CPU_LIMIT_S,
        wall_limit_s=_WALL_LIMIT_S,
        memory_bytes=_MEMORY_BYTES,
        is_long=True,
    )
