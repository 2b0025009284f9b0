"""Encoder of pictures: what a model's projector answers, and its process on this host."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from mesh.util.child_environment import inherited_environment
from mesh.util.worker_pool import WorkerEnded, WorkerPool, unpacked_answer
from spanmesh_proto.errors import InvalidModel, InvalidRequest, ProtocolError
from stages.runtime.process_memory import ALLOCATOR
from stages.vision.chunks import PictureParts
from stages.vision.projector import ProjectorFacts, ProjectorMemory, ProjectorOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from stages.vision.picture import Picture

# A picture of many rows on a slow processor, and loading before it.
_WALL_LIMIT_S: Final = 300.0


@dataclass(frozen=True)
class EncodedPicture:
    """Rows of a picture."""

    chunks: tuple[NDArray[np.float32], ...]
    """float32 (num_rows, width) of each chunk of its parts."""
    identity: str
    """That of the projector which computed them, see `ProjectorFacts.identity`."""


class PictureEncoder(Protocol):
    """A model's projector at work, on this host or another one."""

    async def facts(self) -> ProjectorFacts:
        """Facts of the projector, which is loaded for them, and tried out with a blank picture.

        Raises:
            InvalidModel: If it is none for pictures, does not belong to the model, or ended the process.
            MeshError: If it cannot be loaded or does not compute.
        """

    async def parts(self, width: int, height: int, *, client: str | None = None) -> PictureParts:
        """What becomes of a picture of this size, in milliseconds, once those before it are encoded.

        Args:
            width: Its pixels in a row.
            height: Its rows of pixels.
            client: Client of the request, for fair turns.

        Raises:
            InvalidRequest: If the projector takes none of this size, it has too many rows, or it ended the
                process.
            Overloaded: If too many pictures wait.
            MeshError: If the projector does not compute.
        """

    async def encode(
        self, picture: Picture, parts: PictureParts, *, client: str | None = None
    ) -> EncodedPicture:
        """Rows of a picture.

        Args:
            picture: The picture.
            parts: Its parts.
            client: Client of the request, for fair turns.

        Raises:
            MeshError: As `parts`.
        """


class EncoderProcess:
    """A projector in a process of its own, started when it is needed and replaced when it ends.

    Pictures are encoded one after the other, those of different clients by turns. A picture that ends the
    process is answered with an error, and not tried again; one during which something else ended it is, once.
    A picture whose client left is encoded to its end: loading the projector anew would take longer.

    Args:
        options: Settings of the projector.
        wall_limit_s: Most seconds for a picture by the clock, with loading the projector if need be.

    Attributes:
        options: As given.
    """

    def __init__(self, options: ProjectorOptions, *, wall_limit_s: float = _WALL_LIMIT_S) -> None:
        self.options = options
        self._wall_limit_s = wall_limit_s
        self._facts: ProjectorFacts | None = None
        self._pool = self._new_pool()
        # Jobs that wait for an answer, also of a process that is to end.
        self._num_jobs = Counter[WorkerPool]()

    async def facts(self) -> ProjectorFacts:
        """See `PictureEncoder.facts`."""
        if self._facts is None:
            try:
                told, _ = await self._answer("facts")
            except WorkerEnded as end:
                raise InvalidModel(
                    f"{self.options.path} {end.reason} when it was loaded and tried out: take the mmproj"
                    " file of the same model, or leave out --mmproj",
                    param="--mmproj",
                ) from None
            self._facts = ProjectorFacts(**told)
        return self._facts

    async def parts(self, width: int, height: int, *, client: str | None = None) -> PictureParts:
        """See `PictureEncoder.parts`."""
        told, _ = await self._answer_on(width, height, "parts", client=client)
        return PictureParts.of(told["parts"])

    async def encode(
        self, picture: Picture, parts: PictureParts, *, client: str | None = None
    ) -> EncodedPicture:
        """See `PictureEncoder.encode`."""
        facts = await self.facts()
        _, data = await self._answer_on(
            picture.width,
            picture.height,
            "encode",
            picture.rgb,
            client=client,
            identity=facts.identity,
        )
        return EncodedPicture(await asyncio.to_thread(rows_of, data, parts, facts.width), facts.identity)

    async def memory(self) -> ProjectorMemory:
        """Memory of the process, measured with a blank picture; see `Projector.measured`.

        Raises:
            InvalidModel: If the picture ended the process.
            MeshError: If the projector cannot be loaded or does not compute.
        """
        try:
            told, _ = await self._answer("memory")
        except WorkerEnded as end:
            raise InvalidModel(
                f"{self.options.path} {end.reason} with a blank picture: lower --image-max-tokens",
                param="--image-max-tokens",
            ) from None
        return ProjectorMemory(**told)

    async def rest(self) -> None:
        """End the process, once what it has begun is answered; the next picture starts another one."""
        pool, self._pool = self._pool, self._new_pool()
        if not self._num_jobs[pool]:
            await asyncio.to_thread(pool.close)

    def close(self) -> None:
        """End the process. No picture may follow."""
        for pool in {self._pool, *self._num_jobs}:
            pool.close()

    async def _answer_on(
        self,
        width: int,
        height: int,
        kind: str,
        rgb: bytes | memoryview = b"",
        *,
        client: str | None,
        **values: str,
    ) -> tuple[Mapping[str, Any], memoryview]:
        try:
            return await self._answer(kind, rgb, client, width=width, height=height, **values)
        except WorkerEnded as end:
            raise InvalidRequest(
                f"the picture of {width} × {height} pixels {end.reason} when its rows were computed: send it"
                " in another size"
            ) from None

    async def _answer(
        self, kind: str, payload: bytes | memoryview = b"", client: str | None = None, **values: object
    ) -> tuple[Mapping[str, Any], memoryview]:
        header = json.dumps({"kind": kind, "options": asdict(self.options), **values}).encode()
        pool = self._pool
        self._num_jobs[pool] += 1
        try:
            return unpacked_answer(await pool.run(header, payload, client=client))
        finally:
            self._num_jobs[pool] -= 1
            if not self._num_jobs[pool]:
                del self._num_jobs[pool]
                if pool is not self._pool:
                    await asyncio.to_thread(pool.close)

    def _new_pool(self) -> WorkerPool:
        return WorkerPool(
            "mesh.vision.encoder_worker",
            num_workers=1,
            cpu_limit_s=self._wall_limit_s * max(1, self.options.num_threads),
            wall_limit_s=self._wall_limit_s,
            memory_bytes=0,
            # Without a debugger, which an abort would start.
            environment={**inherited_environment(), **ALLOCATOR, "GGML_NO_BACKTRACE": "1"},
        )


def rows_of(data: bytes | memoryview, parts: PictureParts, width: int) -> tuple[NDArray[np.float32], ...]:
    """Rows of each chunk: copies, so that one that is kept keeps no others.

    Args:
        data: float32 numbers of all rows.
        parts: Parts of the picture.
        width: Numbers of a row.

    Raises:
        ProtocolError: If there are more or fewer numbers.
    """
    if len(data) != parts.num_rows * width * 4:
        raise ProtocolError(
            f"{len(data)} bytes came for {parts.num_rows} rows of a picture, {width} numbers each: install"
            " the same spanmesh on every host"
        )
    rows = np.frombuffer(data, np.float32).reshape(parts.num_rows, width)
    ends = np.cumsum([chunk.num_rows for chunk in parts.chunks])
    return tuple(chunk.copy() for chunk in np.split(rows, ends[:-1]))
