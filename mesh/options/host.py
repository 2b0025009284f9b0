"""Options of `mesh serve` and `mesh join`: of their host, of the head, and of models on demand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from mesh.options.model import API, PLACEMENT, SESSIONS, SPECULATION, ModelOptions
from mesh.options.option import Option, Options
from spanmesh_proto.addresses import PortRange
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from mesh.placement.topology import Topology
else:
    # pydantic needs a class; importing this one takes longer than `mesh serve --help`.
    Topology = object

ON_DEMAND: Final = "Models on demand"
JOINING: Final = "Joining hosts"
WEIGHTS: Final = "Weights"
AFTER_CRASH: Final = "After a crash"
# Long enough for a person or systemd to start it again; hosts and their stages end after that.
_LINGER_S: Final = 120.0
_RECORD_BYTES: Final = 10 << 30


class HostOptions(Options):
    """Options of a host, whether it is the head's or another."""

    threads: Annotated[
        int | None,
        Field(ge=1),
        Option(
            section=PLACEMENT,
            metavar="N",
            is_of_stages=True,
            help="Threads of this host for computing.  [default: one a core]",
        ),
    ] = None
    memory_bytes: Annotated[
        int | None,
        Option(
            section=PLACEMENT,
            flag="--memory",
            kind="size",
            metavar="SIZE",
            is_of_stages=True,
            help="Memory of this host for the mesh, such as 8G: for stages, and on the head for draft model "
            "and texts.  [default: all that is free]",
        ),
    ] = None
    gpu_layers: Annotated[
        int | None,
        Option(
            section=PLACEMENT,
            kind="gpu layers",
            metavar="N|all|none|auto",
            is_of_stages=True,
            help="Layers of each stage on this host's GPUs.  [default: as many as fit]",
        ),
    ] = None
    cpu_moe: Annotated[
        bool,
        Option(
            section=PLACEMENT,
            is_of_stages=True,
            help="Keep the experts of all layers with this host's processor, the rest of a layer on its "
            "GPUs.",
        ),
    ] = False
    n_cpu_moe: Annotated[
        int | None,
        Field(ge=0),
        Option(
            section=PLACEMENT,
            metavar="N",
            is_of_stages=True,
            help="The same for the model's first N layers only.  [default: as few as give the others room]",
        ),
    ] = None
    advertise: Annotated[
        str | None,
        Option(
            section=JOINING,
            metavar="IP",
            help="Address at which other hosts reach this one.  [default: all that it has, that of the "
            "default route first]",
        ),
    ] = None
    name: Annotated[
        str,
        Option(section=JOINING, help="Name of this host in the mesh.  [default: its host name]"),
    ] = ""
    port_range: Annotated[
        PortRange | None,
        Option(
            section=JOINING,
            kind="ports",
            metavar="FIRST-LAST",
            help="TCP ports for everything that this host opens to other hosts, Ray included, such as "
            "20000-20099.  [default: any free ports]",
        ),
    ] = None
    models_dir: Annotated[
        Path | None,
        Option(
            section=WEIGHTS,
            flag="--models",
            kind="folder",
            metavar="DIR",
            help="GGUF files on this host, whose layers need no transfer.",
        ),
    ] = None
    cache_bytes: Annotated[
        int | None,
        Option(
            section=WEIGHTS,
            flag="--cache-size",
            kind="size",
            metavar="SIZE",
            help="Limit of stage files on this host's disk; the least recently used are removed first.",
        ),
    ] = None
    kv_disk_bytes: Annotated[
        int | None,
        Option(
            section=SESSIONS,
            flag="--kv-disk",
            kind="disk size",
            metavar="SIZE|none",
            is_of_stages=True,
            help="Keep the KV cache of prompts and answers on disk, up to SIZE on each host, so that it "
            "outlives the processes; a host's own option wins.  [default: none]",
        ),
    ] = None

    @property
    def cpu_moe_layers(self) -> int | None:
        """First layers of a model whose experts stay with the processor; None for as few as needed."""
        from mesh.placement.gpu_layers import parse_cpu_moe  # noqa: PLC0415 - keeps --help quick

        return parse_cpu_moe(self.n_cpu_moe, is_all=self.cpu_moe)


class JoinOptions(HostOptions):
    """Options of `mesh join`."""

    token: Annotated[str, Field(repr=False)]
    discover: Annotated[
        bool,
        Option(
            section=JOINING,
            help="Also find the token's head in the local network by mDNS; without a token, list all heads "
            "there.",
        ),
    ] = False
    give_up_after_s: Annotated[
        float,
        Field(ge=0),
        Option(
            section=JOINING,
            flag="--give-up-after",
            metavar="SECONDS",
            help="Time to wait for a lost head to return.",
        ),
    ] = 600.0


class HeadOptions(HostOptions, ModelOptions):
    """Options of `mesh serve`, and what follows from them on this host."""

    model: Path
    # For joined hosts; and further IP addresses, by which some of them may reach this host instead.
    address: str = ""
    other_addresses: tuple[str, ...] = ()
    # One that was found may be another next time.
    is_address_given: bool = True
    # Read from the file of `topology_path`.
    topology: Topology | None = None
    # The model's files at the hub, if it came from one.
    hub: tuple[Any, ...] = ()

    host: Annotated[str, Option(section=API, help="Address at which the API listens.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535), Option(section=API, help="Port of the API.")] = 8000
    api_key_path: Annotated[
        Path | None,
        Option(
            section=API,
            flag="--api-key-file",
            help="Key file from `mesh keys add`; needed if --host is not loopback.",
        ),
    ] = None
    insecure: Annotated[bool, Option(section=API, help="Allow access from other machines without a key.")] = (
        False
    )
    cors_origins: Annotated[
        tuple[str, ...],
        Option(
            section=API,
            flag="--cors-origin",
            metavar="ORIGIN",
            help="Allow web pages of this origin, or a program of it, such as app://notes.example; may be "
            "given several times.",
        ),
    ] = ()
    num_hosts: Annotated[
        int,
        Field(ge=0),
        Option(section=PLACEMENT, flag="--wait-for", metavar="N", help="Wait until N hosts have joined."),
    ] = 0
    head_only: Annotated[bool, Option(section=PLACEMENT, help="Place no layers on this host.")] = False
    topology_path: Annotated[
        Path | None,
        Option(
            section=PLACEMENT,
            flag="--topology",
            help="Fix the placement by this TOML file, tables [[stage]] with host and layers: no layer is "
            "ever placed elsewhere, and missing hosts are waited for.",
        ),
    ] = None
    repacks: Annotated[
        bool,
        Option(
            section=PLACEMENT,
            flag="--no-repack",
            is_denial=True,
            help="Compute with weights as the file has them, as llama.cpp's RPC server does; slower.",
        ),
    ] = True
    num_groups: Annotated[
        int | None,
        Field(ge=1),
        Option(
            section=SESSIONS,
            flag="--groups",
            metavar="N",
            is_rare=True,
            help="Divide decoding sessions into N groups, whose windows share batches.  [default: the best "
            "by measurement]",
        ),
    ] = None
    record_path: Annotated[
        Path | None,
        Option(
            section=SPECULATION,
            flag="--record",
            kind="new folder",
            metavar="FOLDER",
            help="Record answers and hidden states in this private folder, to tune a drafter on them: of "
            "keys from `mesh keys add --may-record`, or on loopback without keys. Texts can be read there.",
        ),
    ] = None
    record_bytes: Annotated[
        int | None,
        Field(gt=0),
        Option(
            section=SPECULATION,
            flag="--record-limit",
            kind="size",
            metavar="SIZE",
            help="Limit of the recording; the oldest answers are removed first.  [default: 10G]",
        ),
    ] = None
    record_days: Annotated[
        int,
        Field(ge=1),
        Option(section=SPECULATION, metavar="DAYS", help="Time after which a recorded answer is removed."),
    ] = 30
    tune_group: Annotated[
        str | None,
        Option(
            section=SPECULATION,
            flag="--tune",
            metavar="GROUP",
            help="In pauses of the load, tune the drafter on recorded answers to the API keys of "
            "this group (`mesh keys add --may-record --group`), and serve these keys alone with it.",
        ),
    ] = None
    tune_minutes: Annotated[
        int,
        Field(ge=1),
        Option(
            section=SPECULATION,
            metavar="MINUTES",
            help="Longest time of one training, pauses left out.",
        ),
    ] = 20
    tune_idle_s: Annotated[
        float,
        Field(ge=0),
        Option(
            section=SPECULATION,
            flag="--tune-idle",
            metavar="SECONDS",
            is_rare=True,
            help="Time without a request before a training computes.",
        ),
    ] = 60.0
    tap_layers: Annotated[
        tuple[int, ...],
        Option(
            section=SPECULATION,
            kind="layers",
            metavar="A,B,…",
            help="Layers whose inputs are recorded where no drafter reads any.  [default: 2, the middle and "
            "the third from the end]",
        ),
    ] = ()
    library: Annotated[
        tuple[Path, ...],
        Option(
            section=ON_DEMAND,
            kind="folder",
            metavar="DIR",
            help="Folder with GGUF files that requests may have loaded; may be given several times.",
        ),
    ] = ()
    idle_unload_min: Annotated[
        float | None,
        Field(ge=0),
        Option(
            section=ON_DEMAND,
            flag="--idle-unload",
            metavar="MINUTES",
            help="Unload a model that a request loaded when none used it for so long.  [default: never]",
        ),
    ] = None
    min_stay_s: Annotated[
        float,
        Field(ge=0),
        Option(
            section=ON_DEMAND,
            flag="--min-stay",
            metavar="SECONDS",
            is_rare=True,
            help="Time for which a model stays at least, once a request loaded it.",
        ),
    ] = 60.0
    load_wait_s: Annotated[
        float,
        Field(ge=0),
        Option(
            section=ON_DEMAND,
            flag="--load-wait",
            metavar="SECONDS",
            is_rare=True,
            help="Longest wait of a request for its model to be loaded, unless it asked for a stream.",
        ),
    ] = 120.0
    library_threads: Annotated[
        int | None,
        Field(ge=1, le=1024),
        Option(
            section=ON_DEMAND,
            metavar="N",
            is_rare=True,
            help="Threads of each host for each model that a request loaded.  [default: all]",
        ),
    ] = None
    transfer_rate: Annotated[
        int | None,
        Option(
            section=WEIGHTS,
            kind="size",
            metavar="SIZE",
            help="Limit of bytes per second sent to all hosts together, such as 50M.",
        ),
    ] = None
    hub_first: Annotated[
        bool,
        Option(
            section=WEIGHTS,
            is_rare=True,
            help="Hosts fetch from the hub before this host, if the model came from there.",
        ),
    ] = False
    join_port: Annotated[
        int,
        Field(ge=0, le=65535),
        Option(
            section=JOINING,
            metavar="PORT",
            help="Port for joining hosts, which the token names; 0 is that of the identity, or any free one.",
        ),
    ] = 0
    token_path: Annotated[
        Path | None, Option(section=JOINING, flag="--token-file", help="Write the join token to this file.")
    ] = None
    token_hours: Annotated[
        float,
        Field(gt=0),
        Option(section=JOINING, help="Validity of the join token, from when it was made."),
    ] = 24.0
    identity_path: Annotated[
        Path | None,
        Option(
            section=JOINING,
            flag="--identity",
            help="Keep certificate, join token and admitted hosts in this private file, which is made if it "
            "is missing: tokens and hosts stay valid at the next start.  [default: a new mesh at each "
            "start]",
        ),
    ] = None
    discoverable: Annotated[
        bool,
        Option(
            section=JOINING,
            help="Announce this head by mDNS, for `mesh join --discover` in the local network.",
        ),
    ] = False
    linger_wanted_s: Annotated[
        float | None,
        Field(ge=0),
        Option(
            section=AFTER_CRASH,
            flag="--linger",
            metavar="SECONDS",
            help="Time that stages wait for a restart of the head after a crash; Linux only. Without "
            "--wait-for they do so only if this is given.  [default: 120]",
        ),
    ] = None
    state_path: Annotated[
        Path | None,
        Option(
            section=AFTER_CRASH,
            flag="--state",
            help="File for the state that a restart needs.  [default: in ~/.local/state/spanmesh]",
        ),
    ] = None

    def require_consistent(self) -> None:
        """Check that no options contradict one another, or what this system can do.

        Raises:
            InvalidRequest: Naming one of them.
        """
        super().require_consistent()
        if self.linger_wanted_s and sys.platform != "linux":
            raise InvalidRequest(
                "--linger needs Linux: elsewhere stages end with their head; leave it out",
                param="linger_wanted_s",
            )
        if self.topology_path is not None and (self.stages or self.split or self.num_hosts):
            raise InvalidRequest(
                "--topology fixes which hosts hold which layers: leave out --stages, --split and --wait-for",
                param="topology_path",
            )
        if self.idle_unload_min is not None and not self.library:
            raise InvalidRequest(
                "--idle-unload is for models that requests load: name a folder by --library",
                param="idle_unload_min",
            )
        if self.record_path is None and (self.record_bytes or self.tap_layers):
            given = "tap_layers" if self.tap_layers else "record_bytes"
            raise InvalidRequest(
                "--record-limit and --tap-layers are for recordings: name a folder by --record", param=given
            )
        if self.tune_group is not None and self.record_path is None:
            raise InvalidRequest(
                "--tune learns from recorded answers: name a folder by --record", param="tune_group"
            )

    @property
    def linger_s(self) -> float:
        """Time for which stages wait for a new head after a crash; 0 for not at all."""
        # Elsewhere nothing outlives its head.
        if sys.platform != "linux":
            return 0.0
        if self.linger_wanted_s is not None:
            return self.linger_wanted_s
        return _LINGER_S if self.num_hosts else 0.0

    @property
    def most_record_bytes(self) -> int:
        """Limit of the recording."""
        return self.record_bytes or _RECORD_BYTES

    @property
    def idle_unload_s(self) -> float | None:
        """A model that no request used for this long is unloaded; None for never."""
        return None if self.idle_unload_min is None else self.idle_unload_min * 60
