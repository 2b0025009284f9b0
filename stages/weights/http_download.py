"""HTTP range requests and whole downloads."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto.errors import ClusterError, HubUnavailable, ModelError
from stages.files import require_disk, user_folder, write_all, write_error
from stages.tls import system_authorities
from stages.weights.assembly import note_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
_TIMEOUT_S: Final = 20.0
_READ_BYTES: Final = 1024 * 1024
# Tries in a row without a single byte.
_MOST_FRUITLESS: Final = 5
_FIRST_PAUSE_S: Final = 0.5
# Longest pause that a hub may ask for.
_MOST_PAUSE_S: Final = 60.0
_TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_BLOCK_BYTES: Final = 16 * 1024 * 1024
_NUM_CONNECTIONS: Final = 4
_BUFFER_BYTES: Final = 1024 * 1024

log = structlog.get_logger()


class TransientError(Exception):
    """Another try may succeed.

    Args:
        reason: One line for the operator.
        pause_s: Pause before the next try, if the server gives one.
    """

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.pause_s = pause_s


class _Blocks:
    def __init__(
        self, url: str, size_bytes: int, file: int, note: Path, on_bytes: Callable[[int], None]
    ) -> None:
        self._url = url
        self._size_bytes = size_bytes
        self._file = file
        self._note_path = note
        self._on_bytes = on_bytes
        self._is_over = threading.Event()

    def fetch(self) -> None:
        note = os.open(self._note_path, os.O_RDWR | os.O_CREAT, 0o644)
        pool = ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="hub")
        try:
            os.ftruncate(self._file, self._size_bytes)
            num_blocks = -(-self._size_bytes // _BLOCK_BYTES)
            here = os.pread(note, num_blocks, 0).ljust(num_blocks, b"\0")
            for index in range(num_blocks):
                if here[index]:
                    self._on_bytes(self._length(index))
            missing = [index for index in range(num_blocks) if not here[index]]
            for task in as_completed([pool.submit(self._fetch_block, index, note) for index in missing]):
                task.result()
        finally:
            self._is_over.set()
            pool.shutdown(cancel_futures=True)
            os.close(note)

    def _fetch_block(self, index: int, note: int) -> None:
        at = index * _BLOCK_BYTES

        def take(data: bytes) -> None:
            nonlocal at
            self._sleep(0)
            write_all(self._file, data, at)
            at += len(data)
            self._on_bytes(len(data))

        read_range(self._url, at, self._length(index), take, sleep=self._sleep)
        os.pwrite(note, b"\x01", index)

    def _sleep(self, seconds: float) -> None:
        """Sleep, but no longer than the bound on pauses."""
        if self._is_over.wait(seconds):
            raise ModelError("the download was cancelled")

    def _length(self, index: int) -> int:
        return min(_BLOCK_BYTES, self._size_bytes - index * _BLOCK_BYTES)


def endpoint() -> str:
    """URL of the hub: `HF_ENDPOINT`, or Hugging Face."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def read_range(
    url: str,
    start: int,
    count: int,
    take: Callable[[bytes], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Read a range of a file, continuing after transient errors.

    Args:
        url: URL of the file.
        start: First byte.
        count: Number of bytes.
        take: Called with the bytes as they come.
        sleep: Waits for seconds, between tries; may raise.

    Raises:
        HubUnavailable: If the hub refuses it, does not have it, or fails in several tries.
    """
    done, num_fruitless = 0, 0
    while done < count:
        before, error = done, TransientError("the connection ended early")
        try:
            with open_range(url, start + done, count - done) as chunks:
                for data in chunks:
                    take(data)
                    done += len(data)
        except TransientError as transient:
            error = transient
        if done < count:
            num_fruitless = 0 if done > before else num_fruitless + 1
            if num_fruitless >= _MOST_FRUITLESS:
                raise HubUnavailable(
                    f"{url}: {error.reason}, {num_fruitless} times in a row; check that it can be reached "
                    "from here, and try again later: the bytes received so far are kept"
                ) from None
            pause_s = error.pause_s or _FIRST_PAUSE_S * 2**num_fruitless
            log.warning("hub_again", url=url, reason=error.reason, in_s=round(pause_s, 1))
            sleep(min(pause_s, _MOST_PAUSE_S))


@contextmanager
def open_range(url: str, start: int, count: int) -> Iterator[Iterator[bytes]]:
    """Request a range of a file.

    Raises:
        HubUnavailable: If the hub refuses it, or does not have it.
        TransientError: If another try may succeed.
    """
    import httpx  # noqa: PLC0415 - 2 MB, which a stage that fetches from no hub does not need

    if not url.startswith(("http://", "https://")):
        raise HubUnavailable(f"{url} is not an address of a hub: it must begin with https://")
    headers = {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
    token = _token()
    if token and url.startswith(f"{endpoint()}/"):
        # httpx leaves it out behind a redirect: the other server has credentials of its own in the URL.
        headers["Authorization"] = f"Bearer {token}"
    try:
        with (
            httpx.Client(verify=system_authorities(), timeout=_TIMEOUT_S, follow_redirects=True) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            if answer.is_error:
                raise refusal(url, answer.status_code, answer.headers.get("Retry-After"))
            if answer.status_code != httpx.codes.PARTIAL_CONTENT:
                raise HubUnavailable(f"{url} is not sent in parts: the server there ignores ranges")
            yield _chunks(answer, count)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TransientError(f"no answer ({error or type(error).__name__})") from error


def _chunks(answer: httpx.Response, count: int) -> Iterator[bytes]:
    for data in answer.iter_raw():
        yield data[:count]
        count -= len(data)
        if count <= 0:
            return


def refusal(what: str, status: int, retry_after: str | None = None) -> HubUnavailable | TransientError:
    """The exception for an HTTP error.

    Args:
        what: Name of the request.
        status: Status of the answer.
        retry_after: The `Retry-After` header, if there is one.
    """
    if status in {401, 403}:
        return HubUnavailable(
            f"the hub refuses {what} ({status}): it is private or gated, or does not exist; check the name, "
            "accept its terms, and set HF_TOKEN to a token that may read it"
        )
    if status == 404:
        return HubUnavailable(f"the hub has no {what} (404): check the name and the revision")
    if status in _TRANSIENT:
        reason = "the hub limits the request rate (429)" if status == 429 else f"the hub answers {status}"
        pause_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
        return TransientError(reason, pause_s)
    return HubUnavailable(f"the hub answers {status} for {what}; try again later")


def _token() -> str | None:
    """Token of this host's user, as `huggingface-cli login` stores it."""
    token = os.environ.get("HF_TOKEN")
    if not token:
        try:
            token = (user_folder("HF_HOME", ".cache", "huggingface") / "token").read_text()
        except (OSError, ClusterError):
            return None
    return token.strip() or None


def download(
    url: str,
    size_bytes: int,
    sha256: str | None,
    path: Path,
    *,
    on_bytes: Callable[[int], None],
    on_hashed: Callable[[int], None] = lambda _count: None,
) -> None:
    """Download a file; it gets its name when it is complete and its hash is right.

    Args:
        url: URL, at a revision that does not change.
        size_bytes: Its size.
        sha256: Hash of its content, hex; None if the hub has none.
        path: Target; partial content lies beside it.
        on_bytes: Called with the number of bytes that came, or were here, from several threads; may raise.
        on_hashed: Called with the number of bytes just checked; may raise.

    Raises:
        HubUnavailable: If the hub refuses or does not answer, or the hash is wrong.
        ModelError: If the disk is full or not writable, or another process downloads it.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(file, partial)
            require_disk(path, size_bytes - os.fstat(file).st_blocks * 512)
            _Blocks(url, size_bytes, file, note_path(partial), on_bytes).fetch()
            if sha256 is not None:
                _check(file, size_bytes, sha256, partial, on_hashed)
            os.fsync(file)
        finally:
            os.close(file)
        partial.replace(path)
        note_path(partial).unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error, size_bytes) from error


def _lock(file: int, partial: Path) -> None:
    """Lock the partial file: other writers would find it moved or changed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(file), partial.stat())
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    if not is_ours:
        raise ModelError(
            f"{partial.name.removesuffix('.partial')} is being fetched by another process: wait until that "
            "is done, then try again"
        )


def _check(file: int, size_bytes: int, sha256: str, partial: Path, on_hashed: Callable[[int], None]) -> None:
    digest, at = hashlib.sha256(), 0
    while at < size_bytes:
        data = os.pread(file, _BUFFER_BYTES, at)
        if not data:
            break
        digest.update(data)
        at += len(data)
        on_hashed(len(data))
    if digest.hexdigest() != sha256:
        partial.unlink()
        note_path(partial).unlink(missing_ok=True)
        raise HubUnavailable(
            f"{partial.name.removesuffix('.partial')} has sha256 {digest.hexdigest()[:12]}, but the hub "
            f"names {sha256[:12]}: it was removed; pull it again"
        )
