"""What a repository of the hub holds, asked of the hub."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.hub.choice import RepoFile
from spanmesh_proto.errors import ClusterError, HubUnavailable
from stages.weights.http import TransientError, endpoint, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.hub.reference import HubReference

# What git calls a commit, by SHA-1 or SHA-256. A folder here is called so, too: nothing else will do.
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TIMEOUT_S: Final = 20.0
_MOST_TRIES: Final = 4
_FIRST_PAUSE_S: Final = 0.5
_MOST_PAUSE_S: Final = 30.0


@dataclass(frozen=True)
class Repository:
    """A repository at one commit.

    Attributes:
        repo: `org/repo`.
        commit: Which, by its hash in hex; its files do not change any more.
        files: What it holds.
    """

    repo: str
    commit: str
    files: tuple[RepoFile, ...]

    def url(self, file: RepoFile) -> str:
        """Where a file of it is."""
        from huggingface_hub import hf_hub_url  # noqa: PLC0415 - an extra

        return str(hf_hub_url(self.repo, file.name, revision=self.commit, endpoint=endpoint()))


def read_repository(reference: HubReference, *, sleep: Callable[[float], None] = time.sleep) -> Repository:
    """Ask the hub.

    Args:
        reference: Which repository, at which revision.
        sleep: Waits for seconds, between tries.

    Raises:
        HubUnavailable: If it refuses, has no such repository, or does not answer.
        ClusterError: If the extra that talks to it is not installed.
    """
    for num_tries in range(1, _MOST_TRIES + 1):
        try:
            return _read(reference)
        except TransientError as error:
            if num_tries == _MOST_TRIES:
                raise HubUnavailable(
                    f"{endpoint()} does not hand out {reference.repo}: {error.reason}, {num_tries} times; "
                    "look whether it can be reached from here, and try again later"
                ) from None
            sleep(min(error.pause_s or _FIRST_PAUSE_S * 2**num_tries, _MOST_PAUSE_S))
    raise AssertionError("the last try returns or raises")


def _read(reference: HubReference) -> Repository:
    try:
        import httpx2  # noqa: PLC0415 - comes with the extra
        from huggingface_hub import HfApi  # noqa: PLC0415 - an extra
        from huggingface_hub.errors import (  # noqa: PLC0415
            HfHubHTTPError,
            HFValidationError,
            OfflineModeIsEnabled,
        )
    except ImportError:
        raise ClusterError(
            "models from the hub need the package huggingface_hub: pip install 'spanmesh[hub]'"
        ) from None
    try:
        info = HfApi(endpoint=endpoint()).model_info(
            reference.repo, revision=reference.revision, files_metadata=True, timeout=_TIMEOUT_S
        )
    except HfHubHTTPError as error:
        answer = error.response
        raise refusal(reference.repo, answer.status_code, answer.headers.get("Retry-After")) from None
    except OfflineModeIsEnabled:
        raise HubUnavailable(
            f"{reference} is at the hub, and HF_HUB_OFFLINE forbids to ask there: unset it, or name a file"
        ) from None
    except (httpx2.HTTPError, OSError) as error:
        raise TransientError(f"no answer ({error or type(error).__name__})") from None
    except HFValidationError:
        raise HubUnavailable(
            f"{reference.repo!r} is no name that a hub gives to a repository: look for the name there"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise _no_hub() from None
    if not _COMMIT.fullmatch(info.sha or ""):
        raise _no_hub()
    return Repository(reference.repo, info.sha, tuple(map(_file, info.siblings or ())))


def _no_hub() -> HubUnavailable:
    return HubUnavailable(
        f"{endpoint()} does not answer like a hub: look at HF_ENDPOINT, and whether a proxy or a login page "
        "is in between"
    )


def _file(sibling: Any) -> RepoFile:
    lfs = sibling.lfs
    return RepoFile(sibling.rfilename, int(sibling.size or 0), None if lfs is None else str(lfs.sha256))
