"""Transfers that are killed or corrupted on the way."""

from __future__ import annotations

import asyncio
import datetime as dt
import filecmp
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.cluster.addresses import free_port
from mesh.cluster.admission import Admissions
from mesh.cluster.certificates import Authority, make_certificate
from mesh.cluster.host_facts import read_versions
from mesh.cluster.join_token import JoinToken
from mesh.cluster.members import Members
from mesh.cluster.membership_server import MembershipServer, MembershipService, RayAccess
from stages.certification.certify import cut_stage
from stages.weights.assembly import note_path
from stages.weights.disk_cache import StageStore
from stages.weights.fetch import FetchSource, RateLimit, fetch_stage
from stages.weights.virtual_stages import StageCache
from tests.qualification.programs import program_command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path
    from random import Random

    from stages.layers import LayerRange
    from stages.weights.recipe import Recipe
    from stages.weights.virtual_stages import VirtualStage

_ADDRESS: Final = "127.0.0.1"
_SECRET: Final = "bench"
_FAR_FUTURE_S: Final = 2**39
# Between a look at how far a transfer is and the next.
_LOOK_S: Final = 0.01
_START_S: Final = 60.0


@dataclass(frozen=True)
class TransferReport:
    """Result of a transfer."""

    weight_bytes: int
    """Of the stage."""
    num_kills: int
    """How often its transfer was killed."""
    sent_bytes: int
    """Of weights that the head read for it in all."""
    is_equal: bool
    """Whether it ended byte-equal with the stage cut directly."""
    num_turned: int
    """Bytes that were flipped: on the way, on the disk in between, on the disk afterwards."""
    num_noticed: int
    """How many of these were noticed."""
    refetched_bytes: int
    """Bytes sent again for them."""
    turned_bytes: int
    """Of the pieces that they were in."""
    is_equal_again: bool
    """Whether it was byte-equal after that."""

    @property
    def passed(self) -> bool:
        """Whether nothing was lost, and only wrong pieces came twice."""
        return (
            self.is_equal
            and self.is_equal_again
            and self.num_noticed == self.num_turned
            and self.refetched_bytes == self.turned_bytes
        )


class _CountingCache(StageCache):
    """Counts what is read of stages, and turns a bit of one byte the next time it is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sent_bytes = 0
        self.turn_at: int | None = None

    def open(self, sha256: str) -> VirtualStage | None:
        stage = super().open(sha256)
        if stage is not None:
            read = stage.read

            def counted(at: int, count: int) -> bytes:
                data = read(at, count)
                self.sent_bytes += len(data)
                if self.turn_at is None or not at <= self.turn_at < at + len(data):
                    return data
                turned = bytearray(data)
                turned[self.turn_at - at] ^= 16
                self.turn_at = None
                return bytes(turned)

            stage.read = counted  # type: ignore[method-assign]
        return stage


@asynccontextmanager
async def sending_head(cache: StageCache, rate: RateLimit | None = None) -> AsyncIterator[FetchSource]:
    """Sends the stages of a cache while in the block; gives where to fetch them.

    Args:
        cache: Stage files.
        rate: How fast they are sent.
    """
    certificate = make_certificate(dt.datetime.now(dt.UTC))
    address = f"{_ADDRESS}:{free_port(_ADDRESS)}"
    service = MembershipService(
        admissions=Admissions(JoinToken((address,), _SECRET, certificate.fingerprint, _FAR_FUTURE_S)),
        ray=RayAccess("", ""),
        members=Members(),
        cache=cache,
        versions=read_versions(),
        authority=Authority(certificate),
        rate=rate,
    )
    server = MembershipServer(service, certificate)
    await server.start(_ADDRESS, int(address.rpartition(":")[2]))
    try:
        yield FetchSource(address, certificate.certificate_pem, service.fetch_secret)
    finally:
        await server.stop()


async def disrupt_transfers(
    model: Path, layers: LayerRange, folder: Path, *, num_kills: int, rate: float, random: Random
) -> TransferReport:
    """Kill a transfer over and over, let it end; then flip bytes, and let it mend.

    Args:
        model: Model of the stage.
        layers: Which.
        folder: Where hosts' caches are to be.
        num_kills: How often.
        rate: Bytes a second, so that there is something to kill.
        random: Decides when.
    """
    cache = _CountingCache(folder / "head")
    recipe = await asyncio.to_thread(cache.describe, model, layers)
    expected = folder / "expected.gguf"
    await asyncio.to_thread(cut_stage, model, layers, expected)
    store = StageStore(folder / "host")
    async with sending_head(cache, RateLimit(rate)) as source:
        certificate = folder / "certificate.pem"
        certificate.write_bytes(source.certificate_pem)
        arguments = (str(store.root), recipe.sha256, source.address, str(certificate), source.secret)
        killed = 0
        # Time enough in all that the last kill comes before the end.
        longest_s = 1.4 * recipe.weight_bytes / rate / max(1, num_kills)
        for _ in range(num_kills):
            killed += await _kill_one(arguments, store, recipe, random.uniform(0, longest_s))
    async with sending_head(cache) as source:
        path = (await fetch_stage(store, recipe.sha256, source)).path
        is_equal = await asyncio.to_thread(filecmp.cmp, path, expected, shallow=False)
        sent_bytes = cache.sent_bytes
        turned = random.sample(range(len(recipe.pieces)), 3)
        pieces = [recipe.pieces[index] for index in turned]
        places = [piece.at + random.randrange(piece.num_bytes) for piece in pieces]
        store.settle(recipe.sha256)
        # After it was whole: found when the stage is next looked for.
        _flip(path, places[0])
        noticed = int(store.find(recipe.sha256) is None)
        # While half of it is there: found before the transfer goes on.
        _flip(store.partial(recipe.sha256), places[1])
        # On the way: the piece that comes for the first one.
        cache.turn_at = places[0]
        mended = await fetch_stage(store, recipe.sha256, source)
        noticed += mended.transfer.wrong_pieces
        is_equal_again = await asyncio.to_thread(filecmp.cmp, mended.path, expected, shallow=False)
    return TransferReport(
        recipe.weight_bytes,
        killed,
        sent_bytes,
        is_equal,
        3,
        noticed,
        mended.transfer.head_bytes,
        2 * pieces[0].num_bytes + pieces[1].num_bytes,
        is_equal_again,
    )


async def _kill_one(arguments: tuple[str, ...], store: StageStore, recipe: Recipe, after_s: float) -> int:
    """Start a transfer, and kill it some seconds after it began to fill; tells whether it lived till then."""
    partial = store.partial(recipe.sha256)
    before = _note(partial)
    process = await asyncio.create_subprocess_exec(
        *program_command("tests.qualification.weights.child", "fetch", *arguments),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_START_S):
            while process.returncode is None and _note(partial) == before:  # noqa: ASYNC110 - a file
                await asyncio.sleep(_LOOK_S)
        try:
            async with asyncio.timeout(after_s):
                await process.wait()
        except TimeoutError:
            return 1
        return 0
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()


def _note(partial: Path) -> bytes:
    try:
        return note_path(partial).read_bytes()
    except FileNotFoundError:
        return b""


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
