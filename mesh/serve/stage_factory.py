"""Stage factory: configurations, recipes and weight transfers of the stages of a placement."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from mesh.serve.stage_handle import StageHandle, new_ring_credentials
from mesh.util.terminal import progress_bars
from spanmesh_proto.errors import InvalidModel, UncuttableModel
from stages.cancellable_work import CancellableWork, in_own_thread
from stages.gguf import part_paths
from stages.runtime.stage_runtime import RuntimeOptions
from stages.serving.actor import SecondFile, StageConfig
from stages.weights.assembly import Transfer
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from pathlib import Path

    from mesh.cluster.members import Member
    from mesh.options.host import HeadOptions
    from mesh.placement.planner import StagePlacement
    from mesh.serve.head import Head
    from mesh.serve.preflight import Preflight
    from mesh.util.terminal import ProgressTask
    from stages.layers import LayerRange
    from stages.runtime.process_memory import StageMemory
    from stages.transport.hidden_codec import HiddenType
    from stages.weights.fetch import FetchSource
    from stages.weights.hashing import FileStamp
    from stages.weights.recipe import Recipe
    from stages.weights.virtual_stages import StageCache

log = structlog.get_logger()


class ServedFiles:
    """Files of a model that is served; they may be replaced meanwhile.

    Args:
        model: The model's first file.
        stamps: Stamps of all its files when it was checked.
    """

    def __init__(self, model: Path, stamps: tuple[FileStamp, ...]) -> None:
        self._paths = part_paths(model)
        self._stamps = stamps
        self._changed = model
        found, inodes = self._look()
        # Of the files with these stamps; others may be in their place already.
        self._inodes = inodes if found == stamps else ()

    async def are_touched(self) -> bool:
        """Whether their stamps differ from those that were found last. Files that are gone have none."""
        found, _inodes = await in_own_thread(self._look)
        return self._differ(found)

    async def are_others(
        self, have_same_hashes: Callable[[], Awaitable[bool | None]], *, is_needed: bool
    ) -> bool:
        """Whether there are files with other content in their place. Files that are gone are none.

        Args:
            have_same_hashes: Returns whether what was hashed before has the same hashes now, or None if not
                all was. Awaited if files that are needed may have been copied, or put back.
            is_needed: Whether anything is to be read that was not hashed before. Otherwise sizes and times of
                modification decide, and nothing is hashed.
        """
        found, inodes = await in_own_thread(self._look)
        if not self._differ(found):
            return False
        if [stamp.size_bytes for stamp in found] != [stamp.size_bytes for stamp in self._stamps]:
            return True
        are_unmodified = [each.mtime_ns for each in found] == [each.mtime_ns for each in self._stamps]
        if are_unmodified and inodes == self._inodes:
            # Renamed, linked, or with other permissions.
            self._stamps = found
            return False
        if not is_needed:
            return not are_unmodified
        are_same = await have_same_hashes()
        if are_same is None:
            # A file keeps the time of its last modification when it is moved.
            are_same = are_unmodified
        if are_same:
            self._stamps, self._inodes = found, inodes
        return not are_same

    def error(self) -> InvalidModel:
        """Error for a model that needs files that were replaced."""
        return InvalidModel(
            f"{self._changed} was changed since it was served: start `mesh serve` again, or put the old file "
            "back"
        )

    def _look(self) -> tuple[tuple[FileStamp, ...], tuple[tuple[int, int], ...]]:
        """Stamps of the files, and their devices and inodes; empty if one is gone."""
        try:
            statuses = [path.stat() for path in self._paths]
            return stamps_of(self._paths), tuple((each.st_dev, each.st_ino) for each in statuses)
        except (InvalidModel, OSError):
            return (), ()

    def _differ(self, found: tuple[FileStamp, ...]) -> bool:
        """Whether stamps that were found, if any, are others; notes the first such file."""
        for path, now, before in zip(self._paths, found, self._stamps, strict=bool(found)):
            if now != before:
                self._changed = path
                return True
        return False


class StageMaker:
    """Makes the stages of one model.

    Args:
        options: Options of the model.
        known: Results of the checks before the start.
        head: The open head.
        cache: Stage files of this host, from which other hosts fetch.
        transfers: Record of weights sent to hosts.

    Attributes:
        workload: What each stage holds besides weights.
    """

    def __init__(
        self,
        options: HeadOptions,
        known: Preflight,
        head: Head,
        cache: StageCache,
        transfers: Transfers,
    ) -> None:
        self._options = options
        self.workload = known.workload
        self._known = known
        self._head = head
        self._cache = cache
        self._transfers = transfers
        self._files = ServedFiles(options.model, known.stamps)
        self._recipes: dict[LayerRange, Recipe] = {}
        drafter = known.drafter
        self._assistant_path = drafter.path if drafter is not None and drafter.is_beside_tail else None
        self._assistant: Recipe | None = None

    async def describe(self, stages: Iterable[tuple[str, LayerRange]]) -> None:
        """Compute the recipes of stages, so that their hosts can fetch the weights.

        Args:
            stages: Host name and layers of each stage.

        Raises:
            InvalidModel: If the model's file is needed, and was replaced since the model was checked.
            ModelError: See `StageCache.describe`.
        """
        if self._assistant is None and self._assistant_path is not None:
            with progress_bars() as bars:
                bar = bars.add(f"hashing {self._assistant_path.name}")
                self._assistant = await described(
                    partial(self._cache.describe_whole, self._assistant_path), bar
                )
        wanted = [(self._head.members.find(host), layers) for host, layers in stages]
        cut = dict.fromkeys(layers for member, layers in wanted if not self._is_model_itself(member, layers))
        missing = tuple(layers for layers in cut if layers not in self._recipes)
        is_needed = bool(missing) or any(self._is_model_itself(*stage) for stage in wanted)
        if wanted and await self._files.are_others(self._have_same_hashes, is_needed=is_needed):
            error = self._files.error()
            if is_needed:
                raise error
            # A host that lacks weights is refused those that are others now; see `VirtualStage`. Other hosts
            # have them in their caches, or the hub has.
            log.warning("model_changed", reason=error.message)
        if missing:
            recipes = await describe_stages(self._cache, self._options.model, missing)
            if await self._files.are_touched():
                raise self._files.error()
            self._recipes.update({recipe.layers: recipe for recipe in recipes})

    async def _have_same_hashes(self) -> bool | None:
        """Whether the model's files have the hashes of all recipes; None if these lack layers."""
        recipes = tuple(self._recipes.values())
        for recipe in recipes:
            try:
                (found,) = await describe_stages(self._cache, self._options.model, (recipe.layers,))
            except (InvalidModel, UncuttableModel):
                return False
            if found.sha256 != recipe.sha256:
                return False
        hashed = {layer for recipe in recipes for layer in range(recipe.layers.start, recipe.layers.stop)}
        return True if len(hashed) == self._known.model.n_layers else None

    def make(
        self,
        placement: StagePlacement,
        member: Member,
        *,
        wire: HiddenType,
        num_threads: int,
        beside: Sequence[StageMemory] = (),
    ) -> StageHandle:
        """A stage whose recipe was computed; its process is not started.

        Args:
            placement: Layers and memory of the stage.
            member: Its host.
            wire: Format of its hidden states on the wire.
            num_threads: Threads of the host for this stage.
            beside: Memory of other stages that are to be loaded there at the same time.
        """
        layers, workload = placement.layers, self.workload
        recipe = None if self._is_model_itself(member, layers) else self._recipes[layers]
        assistant = self._assistant if layers.stop == self._known.model.n_layers else None
        # Random credentials until it joins a ring.
        credentials = new_ring_credentials()
        config = StageConfig(
            stage_index=0,
            layers=layers,
            sha256="" if recipe is None else recipe.sha256,
            whole=str(self._options.model.absolute()) if recipe is None else None,
            source=self._source_for(member, recipe),
            options=RuntimeOptions(
                num_slots=workload.num_slots,
                ctx_size=workload.ctx_size,
                num_threads=num_threads,
                exact=self._options.exact,
                kv_type=workload.kv_type,
                gpu_layers=placement.memory.gpu_layers,
                num_checkpoints=workload.num_checkpoints,
                repacks=workload.repacks,
                cpu_moe_layers=placement.memory.cpu_moe_layers,
                has_reader=assistant is not None,
                most_at_once=workload.most_at_once,
            ),
            host=member.name,
            memory=placement.memory,
            beside_bytes=sum(other.loading_bytes for other in beside),
            beside_gpu_bytes=_on_gpus(beside),
            mesh_id=credentials.mesh_id,
            mesh_key=credentials.mesh_key,
            hidden_type=wire,
            kv_disk_bytes=self._options.kv_disk_bytes or 0,
            second_file=None if assistant is None else self._beside(member, assistant),
        )
        return StageHandle(
            self._head.driver, self._head.authority, config, member, on_transfer=self._transfers.note
        )

    def _is_model_itself(self, member: Member | None, layers: LayerRange) -> bool:
        """Whether a stage is the whole model, on the host of the model's file: then nothing is cut.

        By the member, not by its name: where the head holds no layers, another host may have the head's name.
        """
        is_whole = len(layers) == self._known.model.n_layers
        return is_whole and member is not None and self._head.is_own(member)

    def _source_for(self, member: Member, recipe: Recipe | None) -> FetchSource:
        """Source of the weights: this host reads the model's file; all others fetch by the recipe."""
        options = self._options
        source = replace(self._head.source_for(member), hub=options.hub, is_hub_first=options.hub_first)
        return self._on_own_disk(member, recipe, source)

    def _beside(self, member: Member, assistant: Recipe) -> SecondFile:
        """The assistant's file for a stage; the hub of the model does not have it."""
        source = self._on_own_disk(member, assistant, self._head.source_for(member))
        return SecondFile(assistant.sha256, source)

    def _on_own_disk(self, member: Member, recipe: Recipe | None, source: FetchSource) -> FetchSource:
        if recipe is None or not self._head.is_own(member):
            return source
        self._cache.store.keep(recipe)
        return replace(source, model=self._cache.known_files(recipe.sha256))


class Transfers:
    """Weights sent to hosts, summed by host."""

    def __init__(self) -> None:
        self._by_host: dict[str, Transfer] = {}

    def note(self, host: str, layers: LayerRange, transfer: Transfer) -> None:
        """Record the transfer of a stage."""
        self._by_host[host] = self.of(host) + transfer
        log.info(
            "weights_brought",
            host=host,
            layers=str(layers),
            reused_bytes=transfer.reused_bytes,
            head_bytes=transfer.head_bytes,
            hub_bytes=transfer.hub_bytes,
        )

    def of(self, host: str) -> Transfer:
        """Sum of all transfers to a host."""
        return self._by_host.get(host, Transfer())


async def describe_stages(cache: StageCache, model: Path, parts: Sequence[LayerRange]) -> tuple[Recipe, ...]:
    """Recipes of these layers, one after the other; hashes are computed once.

    Raises:
        ModelError: See `StageCache.describe`.
    """
    recipes = []
    with progress_bars() as bars:
        for layers in parts:
            bar = bars.add(f"hashing layers {layers}")
            recipes.append(await described(partial(cache.describe, model, layers), bar))
    return tuple(recipes)


async def described(work: Callable[..., Recipe], bar: ProgressTask) -> Recipe:
    """Result of work that hashes, with progress; in a thread.

    Args:
        work: Takes `progress`, which it calls with bytes hashed and bytes in all.
        bar: Progress bar.
    """
    hashing = CancellableWork()

    def on_bytes(done_bytes: int, total_bytes: int) -> None:
        hashing.check()
        bar(done_bytes / total_bytes if total_bytes else 1.0)

    return await hashing.run(partial(work, progress=on_bytes))


def _on_gpus(stages: Sequence[StageMemory]) -> dict[str, int]:
    """Memory of stages on each GPU, summed."""
    taken = Counter[str]()
    for stage in stages:
        taken.update({share.device: share.total_bytes for share in stage.gpus})
    return dict(taken)
