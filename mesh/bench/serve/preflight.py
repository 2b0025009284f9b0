"""A look at the server before the load: is it there, does it let us in, what does it serve?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from mesh.bench.serve.client import one_line
from mesh.bench.serve.reading import error_message
from spanmesh_proto.errors import ClusterError, MeshError, ModelNotFound, Unauthorized

if TYPE_CHECKING:
    from mesh.bench.serve.client import Client

_MODELS_PATH: Final = "/v1/models"


class _WholeBody:
    """Keeps a response; implements `connection.Receiver`."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:  # noqa: ARG002 - not needed here
        self.status = status

    def on_body(self, data: bytes, now_s: float) -> None:  # noqa: ARG002
        self.body += data


async def find_model(client: Client, url: str, model: str | None) -> str:
    """The name to ask for.

    Args:
        client: Asks.
        url: The server's, for errors.
        model: The user's choice; the server's list is not consulted for it, as not every server has one.

    Returns:
        The user's choice, or the first model that the server lists.

    Raises:
        ClusterError: If nobody answers there, or in no way that helps.
        Unauthorized: If the API key is missing or wrong.
        ModelNotFound: If the server lists no model and the user names none.
    """
    answer = _WholeBody()
    try:
        await client.exchange("GET", _MODELS_PATH, b"", answer)
    except OSError as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else one_line(error)
        raise ClusterError(
            f"no server answers at {url} ({reason}); start one, or give another --url"
        ) from None
    if answer.status in {401, 403}:
        raise Unauthorized(f"{url} wants another API key; give it by --api-key-file or MESH_API_KEY")
    if model is not None:
        return model
    if answer.status != 200:
        raise _refusal(url, answer)
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ModelNotFound(f"{url}{_MODELS_PATH} lists no model; name one by --model") from None


def _refusal(url: str, answer: _WholeBody) -> MeshError:
    said = f"{url} answered {answer.status} to {_MODELS_PATH}: {error_message(answer.body) or 'nothing'}"
    if answer.status == 404:
        return ModelNotFound(f"{said}; name the model by --model")
    return ClusterError(f"{said}; try again, or look into the server's log")
