"""Files that one host gets as a whole: hashed before they are sent, refused once they were replaced."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from mesh.serve.stage_factory import ServedFiles, described
from mesh.util.terminal import progress_bars
from spanmesh_proto.errors import InvalidModel, StageFailed
from stages.cancellable_work import in_own_thread
from stages.gguf import part_paths
from stages.serving.actor import SecondFile
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from mesh.cluster.members import Member
    from mesh.serve.head import Head
    from stages.weights.hashing import FileStamp
    from stages.weights.recipe import Recipe
    from stages.weights.virtual_stages import StageCache

log = structlog.get_logger()


class WholeFile:
    """A GGUF file of the head for a process on one host.

    Args:
        path: The file, the first one if there are several.
        head: The open head.
        cache: Files of this host, from which other hosts fetch.
        stamps: Stamps of its files when they were checked; those that they have now unless given.
        n_layers: See `StageCache.describe_whole`.
    """

    def __init__(
        self,
        path: Path,
        head: Head,
        cache: StageCache,
        *,
        stamps: tuple[FileStamp, ...] | None = None,
        n_layers: int | None = None,
    ) -> None:
        self._path = path
        self._head = head
        self._cache = cache
        self._n_layers = n_layers
        self._files = ServedFiles(path, stamps_of(part_paths(path)) if stamps is None else stamps)
        self._recipe: Recipe | None = None

    async def describe(self, hosts: Iterable[str]) -> None:
        """Hash the file once, unless it stays on this host.

        Args:
            hosts: Names of the hosts that get it.

        Raises:
            InvalidModel: If the file is needed, and was replaced since it was checked.
            ModelError: See `StageCache.describe_whole`.
        """
        are_here = [self._is_here(host) for host in hosts]
        is_missing = self._recipe is None and not all(are_here)
        is_needed = is_missing or any(are_here)
        if are_here and await self._files.are_others(self._has_same_hash, is_needed=is_needed):
            if is_needed:
                raise self._files.error()
            # A host that lacks the file is refused another one; other hosts have it in their caches.
            log.warning("model_changed", reason=self._files.error().message)
        if is_missing:
            recipe = await self._described()
            if await self._files.are_touched():
                raise self._files.error()
            self._recipe = recipe

    def source_on(self, member: Member) -> tuple[str, str | None]:
        """Hash of the recipe, and path of the file, for a process on a host: one of them; see `StageConfig`.

        Raises:
            StageFailed: If the file is to be sent and was not hashed.
        """
        if self._head.is_own(member):
            return "", str(self._path.absolute())
        if self._recipe is None:
            raise StageFailed(f"{self._path.name} was not hashed before it was sent")
        return self._recipe.sha256, None

    async def _described(self) -> Recipe:
        with progress_bars() as bars:
            work = partial(self._cache.describe_whole, self._path, n_layers=self._n_layers)
            return await described(work, bars.add(f"hashing {self._path.name}"))

    async def _has_same_hash(self) -> bool | None:
        """Whether the file has the hash of the recipe; None without one."""
        if self._recipe is None:
            return None
        try:
            return (await self._described()).sha256 == self._recipe.sha256
        except InvalidModel:
            return False

    def _is_here(self, host: str) -> bool:
        member = self._head.members.find(host)
        return member is not None and self._head.is_own(member)


class HollowFile:
    """A GGUF file of the head without its weights, for a process on one host; see `describe_hollow`.

    Args:
        path: The file, the first one if there are several.
        head: The open head.
        cache: Files of this host, from which other hosts fetch.
    """

    def __init__(self, path: Path, head: Head, cache: StageCache) -> None:
        self._path = path
        self._head = head
        self._cache = cache
        self._recipe: Recipe | None = None

    async def describe(self) -> None:
        """Read its header, once.

        Raises:
            InvalidModel: If it is no GGUF any more.
        """
        if self._recipe is None:
            self._recipe = await in_own_thread(self._cache.describe_hollow, self._path)

    def on(self, member: Member) -> SecondFile:
        """The file for a process on a host.

        Raises:
            StageFailed: If it was not read.
        """
        source = self._head.source_for(member)
        if self._head.is_own(member):
            return SecondFile("", source, str(self._path.absolute()))
        if self._recipe is None:
            raise StageFailed(f"{self._path.name} was not read before it was sent")
        return SecondFile(self._recipe.sha256, source)
