"""Pictures of a served model: its projector, tried out before the model is loaded, and its process."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog

from mesh.serve.options import projector_options
from mesh.serve.pipeline import Pipeline
from mesh.vision.encoder import EncoderProcess
from mesh.vision.pictures import ModelPictures
from mesh.vision.placed_encoder import PlacedEncoder
from mesh.vision.projectors import encoder_sizes
from spanmesh_proto.errors import InvalidModel
from stages.transport.channels import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mesh.options.host import HeadOptions
    from mesh.placement.encoder_host import EncoderSizes
    from mesh.serve.preflight import Preflight
    from mesh.status import ModelDescription
    from stages.vision.projector import ProjectorOptions

_F32_BYTES: Final = 4

log = structlog.get_logger()


@dataclass(frozen=True)
class ServedPictures:
    """How a model reads pictures."""

    pictures: ModelPictures
    """Turns them into rows."""
    placed: PlacedEncoder
    """Its encoder, wherever that is."""
    options: ProjectorOptions
    """Settings of the projector on the head."""
    sizes: EncoderSizes
    """Sizes of the projector."""
    pipeline: Pipeline
    """The encoder on another host, as one stage; empty while the head encodes."""

    @classmethod
    def of(cls, encoder: EncoderProcess) -> ServedPictures:
        """Pictures whose encoder is a process of the head, for the time being."""
        placed = PlacedEncoder(encoder)
        sizes = encoder_sizes(encoder.options)
        return cls(ModelPictures(placed), placed, encoder.options, sizes, Pipeline())

    def describe(self, model: ModelDescription) -> ModelDescription:
        """The description of a model with its projector, and where that is."""
        handle = next(iter(self.pipeline.handles), None)
        memory = self.sizes.memory if handle is None else handle.config.memory
        return replace(
            model,
            projector=self.sizes.name,
            projector_host=None if handle is None else handle.member.name,
            projector_device=memory.gpus[0].device if memory.gpus else None,
            projector_bytes=memory.total_bytes,
        )


@asynccontextmanager
async def open_pictures(
    options: HeadOptions, known: Preflight
) -> AsyncIterator[tuple[ServedPictures | None, Preflight]]:
    """Run the process of a model's projector, which is loaded and tried out.

    Args:
        options: Options of the model.
        known: Results of its checks.

    Yields:
        How it reads pictures, None if it reads text only; and the results with the rows that its stages have
        to compute at once.

    Raises:
        InvalidModel: If the projector does not belong to the model, cannot be used, or makes more rows at
            once than a message holds.
        ClusterError: If libmtmd is missing.
        StageFailed: If it does not compute.
    """
    path = options.projector_path
    if path is None:
        yield None, known
        return
    encoder = EncoderProcess(projector_options(options, path, num_threads=known.facts.num_threads))
    try:
        facts = await encoder.facts()
        most_at_once = facts.most_at_once
        if most_at_once * facts.width * _F32_BYTES > MAX_MESSAGE_BYTES // 2:
            raise InvalidModel(
                f"{path.name} makes {most_at_once} rows of {facts.width} values that go to a stage at once,"
                f" more than a message holds: lower --image-max-tokens",
                param="--image-max-tokens",
            )
        log.info("pictures_on", model=known.model.name, projector=path.name, kind=facts.kind)
        workload = replace(known.workload, most_at_once=most_at_once)
        yield ServedPictures.of(encoder), replace(known, workload=workload)
    finally:
        encoder.close()
