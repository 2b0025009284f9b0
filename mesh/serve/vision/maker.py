"""Maker of an encoder's process: the projector, and its model without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mesh.serve.one_host_maker import OneHostMaker
from mesh.serve.whole_file import HollowFile, WholeFile
from mesh.vision.encoder_actor import EncoderActor, EncoderConfig
from stages.runtime.stage_runtime import RuntimeOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mesh.cluster.members import Member
    from mesh.serve.head import Head
    from mesh.serve.pictures import ServedPictures
    from mesh.serve.stage_factory import Transfers
    from stages.layers import LayerRange
    from stages.weights.virtual_stages import StageCache

# A head that takes over begins with a process of its own.
_ORPHAN_S: Final = 30.0


class EncoderMaker(OneHostMaker):
    """Makes the process of one encoder of pictures.

    Args:
        pictures: How the model reads pictures.
        head: The open head.
        cache: Files of this host, from which other hosts fetch.
        transfers: Record of weights sent to hosts.
    """

    def __init__(self, pictures: ServedPictures, head: Head, cache: StageCache, transfers: Transfers) -> None:
        sizes = pictures.sizes
        file = WholeFile(sizes.path, head, cache, n_layers=sizes.n_layers)
        super().__init__(file, head, transfers, EncoderActor)
        self._most_tokens = pictures.options.most_tokens
        self._model = HollowFile(pictures.options.model_path, head, cache)

    async def describe(self, stages: Iterable[tuple[str, LayerRange]]) -> None:
        """Hash the projector once, and read its model's header."""
        await super().describe(stages)
        await self._model.describe()

    def _options(self, num_threads: int, gpu_layers: tuple[tuple[str, int], ...]) -> RuntimeOptions:
        return RuntimeOptions(num_threads=num_threads, gpu_layers=gpu_layers)

    def _config(self, member: Member, **common: Any) -> EncoderConfig:
        return EncoderConfig(
            **common,
            second_file=self._model.on(member),
            most_tokens=self._most_tokens,
            orphan_s=_ORPHAN_S,
        )
