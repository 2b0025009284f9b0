"""Mesh under test, in the lab or behind a URL: its address, its keys, its status."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from mesh.cli.head_client import ask_head, head_text
from mesh.status import MeshStatus, SessionsStatus, copied, read_status
from mesh.text.tokenizer import Tokenizer
from meshbench.lab.systems import get_status, get_text
from spanmesh_proto.errors import ClusterError, InvalidModel, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshbench.lab.network import Lab
    from meshbench.lab.systems import MeshSystem
    from meshbench.under_test.options import RemoteTarget

# A head under load answers late.
_TIMEOUT_S: Final = 30.0
_OTHERS: Final = "servers that are no mesh are measured by `mesh bench serve`"


class MeshUnderTest(Protocol):
    """A mesh as its clients meet it."""

    @property
    def url(self) -> str:
        """URL of its API without `/v1`, as the load's clients reach it."""

    @property
    def api_keys(self) -> tuple[str | None, ...]:
        """API keys of the clients, at least one; None is no key."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Further fields of every request."""

    def status(self) -> MeshStatus:
        """Its status.

        Raises:
            MeshError: If the mesh does not answer.
        """

    def metrics(self) -> str:
        """Body of `/metrics`.

        Raises:
            MeshError: If the mesh does not answer.
        """


@dataclass(frozen=True)
class LabMesh:
    """A mesh on hosts of the lab; implements `MeshUnderTest`."""

    lab: Lab
    """Where; host 0 is the head."""
    system: MeshSystem
    """Its processes."""
    api_keys: tuple[str | None, ...] = (None,)
    """See `MeshUnderTest`."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Likewise."""

    @property
    def url(self) -> str:
        """URL of its API on the head."""
        return self.system.url

    def status(self) -> MeshStatus:
        """Its status.

        Raises:
            ClusterError: If it has no ring yet.
        """
        status = get_status(self.lab, self.system.port, api_key=self.api_keys[0])
        if status.sessions is None:
            raise ClusterError(f"the mesh in the lab has no ring: {status.phase or 'unknown'}")
        return status

    def metrics(self) -> str:
        """Body of `/metrics`."""
        return get_text(self.lab, 0, self.system.port, "/metrics", api_key=self.api_keys[0])


@dataclass(frozen=True)
class RemoteMesh:
    """A running mesh behind a URL; implements `MeshUnderTest`."""

    url: str
    """URL of its API without `/v1`."""
    api_key: str | None
    """API key of all requests; None for an open API."""
    model: str
    """Id of the measured model."""
    fields: Mapping[str, Any]
    """Further fields of every request, among them the model."""

    @property
    def api_keys(self) -> tuple[str | None, ...]:
        """The one key."""
        return (self.api_key,)

    def status(self) -> MeshStatus:
        """Its status, of the measured model."""
        found = read_status(ask_head(f"{self.url}/mesh/status", self.api_key, timeout_s=_TIMEOUT_S))
        status = status_of_model(found, self.model)
        if status.sessions is None:
            phase = status.phase or "unknown"
            raise ClusterError(f"the mesh at {self.url} was started anew during the run, and is {phase}")
        return status

    def metrics(self) -> str:
        """Body of `/metrics`."""
        return head_text(f"{self.url}/metrics", self.api_key, timeout_s=_TIMEOUT_S)


@dataclass(frozen=True)
class ServedModel:
    """Facts that a mesh tells of a served model."""

    name: str
    """Name in the model's file."""
    architecture: str
    """Architecture of the model."""
    numeric_mode: str
    """`fast` or `exact`."""
    ctx_size: int
    """Positions of a session."""
    num_slots: int
    """Concurrent sessions."""
    stages: tuple[str, ...]
    """Host and layers of each stage, in pipeline order."""
    speculation: str | None
    """Proposers that the server allows; None where the mesh does not say."""
    software: str
    """Version of spanmesh at the head."""

    @classmethod
    def from_status(cls, status: MeshStatus) -> ServedModel:
        """From the model's part of the status, once it is ready."""
        model, speculation, sessions = status.model, status.speculation, status.sessions or SessionsStatus()
        return cls(
            name=model.name,
            architecture=model.architecture,
            numeric_mode=model.numeric_mode,
            ctx_size=sessions.context,
            num_slots=sessions.slots,
            stages=tuple("{} [{}, {})".format(stage.host, *stage.layers) for stage in status.stages),
            speculation=None if speculation is None else speculation.mode,
            software=status.version or "unknown",
        )

    @property
    def is_exact(self) -> bool:
        """Whether no text depends on what else is computed."""
        return self.numeric_mode == "exact"

    def num_places(self, *, has_key: bool) -> int:
        """Answers that a client may have at once: every slot, or all but one by the usual limit of a key."""
        return max(1, self.num_slots - 1) if has_key else self.num_slots

    def as_conditions(self) -> dict[str, Any]:
        """For a report, by name."""
        return {
            "model": self.name,
            "stages": len(self.stages),
            "placement": "; ".join(self.stages),
            "numeric_mode": self.numeric_mode,
            "ctx_size": self.ctx_size,
            "slots": self.num_slots,
            "speculation_of_the_server": self.speculation or "unknown",
            "software_of_the_server": f"spanmesh {self.software}",
        }


def status_of_model(status: MeshStatus, model: str) -> MeshStatus:
    """One model's part of a status: all of it for the first, less for the others.

    Args:
        status: Of the mesh.
        model: Id of the model.

    Raises:
        ModelNotFound: If it is not served.
    """
    models = status.models
    if models and models[0].name == model:
        return status
    own = next((each for each in models if each.name == model), None)
    if own is None:
        raise ModelNotFound(f"the mesh serves no model {model!r} any more: load it again")
    return copied(
        MeshStatus,
        own,
        version=status.version,
        protocol_version=status.protocol_version,
        hosts=status.hosts,
    )


def reach_mesh(target: RemoteTarget, fields: Mapping[str, Any] = {}) -> tuple[RemoteMesh, ServedModel]:
    """Find a running mesh and the model to be measured.

    Args:
        target: Where it is.
        fields: Further fields of every request.

    Raises:
        Unauthorized: If the API key is missing or wrong.
        ModelNotFound: If the mesh serves no such model.
        ClusterError: If no mesh answers, or it cannot serve the model yet.
    """
    url, key = target.server.base_url, target.api_key
    try:
        found = read_status(ask_head(f"{url}/mesh/status", key, timeout_s=_TIMEOUT_S))
    except ClusterError as error:
        raise ClusterError(f"{error.message}; {_OTHERS}") from None
    names = [each.name for each in found.models]
    if not names or not all(names) or found.ready is None:
        raise ClusterError(f"{url} does not tell its state as a mesh does; {_OTHERS}")
    model = target.model or names[0]
    if model not in names:
        raise ModelNotFound(f"the mesh at {url} serves no model {model!r}; there are {', '.join(names)}")
    status = status_of_model(found, model)
    if not status.ready or status.sessions is None:
        phase = status.lost or status.phase or "starting"
        raise ClusterError(
            f"the mesh at {url} cannot answer yet ({phase}): wait until `mesh status` shows it ready"
        )
    mesh = RemoteMesh(url, key, model, {**fields, "model": model})
    return mesh, ServedModel.from_status(status)


def tokenizer_of(target: RemoteTarget, mesh: RemoteMesh) -> Tokenizer | None:
    """Tokenizer of the file that the command line names; None if it names none.

    Args:
        target: Where the mesh is.
        mesh: The mesh.

    Raises:
        InvalidModel: If the file's vocabulary is not as large as that of the served model.
        MeshError: If the mesh does not answer, or the file is no GGUF.
    """
    if target.model_file is None:
        return None
    tokenizer = Tokenizer(target.model_file)
    listed = ask_head(f"{mesh.url}/v1/models", mesh.api_key, timeout_s=_TIMEOUT_S).get("data") or ()
    num_served = next((each["meta"]["n_vocab"] for each in listed if each["id"] == mesh.model), None)
    if num_served is not None and num_served != tokenizer.n_vocab:
        raise InvalidModel(
            f"{target.model_file.name} has {tokenizer.n_vocab} tokens and {mesh.model} at {mesh.url} has"
            f" {num_served}: name the file of the served model, or leave it out"
        )
    return tokenizer
