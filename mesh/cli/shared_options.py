"""Groups of options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cli.option_types import (
    DiskSize,
    GpuLayers,
    LayerCounts,
    MemorySize,
    Numbers,
    Ports,
    choice_option,
    float_option,
    int_option,
    option_group,
    read_first_key,
    sendable_key,
)
from mesh.util import session_defaults
from mesh.util.child_environment import API_KEY
from speculative.draft import defaults as draft_defaults
from stages.runtime.kv_types import KV_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.hub import PulledModel
    from mesh.serve.options import SpeculationOptions, WeightsOptions
    from mesh.util.progress import ProgressBars
    from stages.weights.disk_cache import StorageOptions


_FILE: Final = click.Path(path_type=Path, dir_okay=False)

_speculation_options: Final = option_group(
    choice_option(
        "--speculate",
        choices=("auto", "off", "ngram", "draft", "replay"),
        default="auto",
        help="Proposer of tokens that the model verifies; auto uses all available ones where they pay.",
    ),
    click.option(
        "--draft",
        "draft_path",
        type=_FILE,
        metavar="PATH",
        help="GGUF file of a drafter: a small model, EAGLE-3, or a head for multi-token prediction.",
    ),
    click.option(
        "--no-draft-head",
        "draft_head",
        is_flag=True,
        flag_value=False,
        default=True,
        help="Do not draft with MODEL's own head for multi-token prediction.",
    ),
    int_option(
        "--draft-max", default=draft_defaults.DRAFT_MAX, metavar="N", help="Maximum of tokens drafted ahead."
    ),
    int_option(
        "--draft-min", default=draft_defaults.DRAFT_MIN, metavar="N", help="Minimum of tokens of a draft."
    ),
    float_option(
        "--p-min",
        most=1.0,
        default=draft_defaults.P_MIN,
        metavar="P",
        help="Probability below which a draft ends.",
    ),
    int_option(
        "--draft-threads", default=draft_defaults.NUM_THREADS, metavar="N", help="Threads of the draft model."
    ),
    int_option(
        "--draft-gpu-layers",
        least=-1,
        default=draft_defaults.NUM_GPU_LAYERS,
        metavar="N",
        help="Layers of the draft model on the GPU, -1 for all.",
    ),
    choice_option(
        "--draft-kv-type",
        choices=KV_TYPES,
        default=draft_defaults.KV_TYPE,
        help="Format of the draft model's KV cache.",
    ),
    int_option(
        "--draft-context",
        default=draft_defaults.CONTEXT,
        metavar="N",
        help="Last positions of a prompt whose hidden states EAGLE-3 and MTP drafters read.",
    ),
    choice_option(
        "--draft-wire",
        choices=("f32", "f16", "q8"),
        default=draft_defaults.WIRE,
        help="Format of these hidden states between hosts.",
    ),
    click.option(
        "--spec-history",
        "keeps_history",
        is_flag=True,
        help="Also propose from earlier answers to the same API key.",
    ),
    int_option("--spec-width", "width", least=0, metavar="N", help="Always propose N tokens per window."),
    int_option("--spec-depth", "depth", metavar="N", help="Always keep N windows in flight."),
    click.option(
        "--no-spec-cancel",
        "cancels",
        is_flag=True,
        flag_value=False,
        default=True,
        help="Do not notify hosts at once of windows that a rejection voided.",
    ),
    click.option(
        "--replay-file",
        "replay_path",
        type=_FILE,
        metavar="PATH",
        help="For benchmarks: recorded answers that --speculate replay proposes.",
    ),
    click.option(
        "--replay-rates",
        type=Numbers(float, 0.0, 1.0),
        default=(),
        metavar="A,B,…",
        help="For benchmarks: replay stands for a drafter of this acceptance, by distance.",
    ),
)


def speculation_from(speculate: str, draft_wire: str, **values: Any) -> SpeculationOptions:
    """What the user said.

    Raises:
        ClusterError: If options contradict one another.
    """
    from mesh.serve.options import SpeculationOptions  # noqa: PLC0415 - keeps --help quick
    from stages.transport.hidden_codec import HiddenType  # noqa: PLC0415

    wire = HiddenType(draft_wire)
    return SpeculationOptions(mode=speculate, draft_wire=wire, **values)  # type: ignore[arg-type]  # click checks it


split_option: Final = click.option(
    "--split", type=LayerCounts(), metavar="A,B,…", help="Layers of each stage, such as 10,10,10."
)
gpu_layers_option: Final = click.option(
    "--gpu-layers",
    default="auto",
    show_default=True,
    metavar="N|all|none|auto",
    type=GpuLayers(),
    help="Layers of each stage on this host's GPUs; as many as fit unless given.",
)
port_range_option: Final = click.option(
    "--port-range",
    metavar="FIRST-LAST",
    type=Ports(),
    help="TCP ports for everything that this host opens to other hosts, Ray included, such as 20000-20099.  "
    "[default: any free ports]",
)
# Of every host.
gpu_options: Final = option_group(
    gpu_layers_option,
    click.option(
        "--cpu-moe",
        "cpu_moe",
        is_flag=True,
        help="Keep the experts of all layers with this host's processor, the rest of a layer on its GPUs.",
    ),
    int_option(
        "--n-cpu-moe",
        "n_cpu_moe",
        least=0,
        metavar="N",
        help="The same for the model's first N layers only.  [default: as few as give the others room]",
    ),
)
one_model_options: Final = option_group(
    _speculation_options,
    int_option("--stages", metavar="N", help="Cut the model into N stages.  [default: the planner's choice]"),
    split_option,
    int_option(
        "--ctx-size",
        least=16,
        metavar="N",
        help="Positions of one session, prompt and answer together.  [default: as memory allows, at most "
        "the model's and 131072]",
    ),
    int_option(
        "--parallel", most=64, default=session_defaults.NUM_SLOTS, metavar="N", help="Concurrent sessions."
    ),
    choice_option(
        "--kv-type",
        choices=KV_TYPES,
        default=session_defaults.KV_TYPE,
        help="Format of the KV caches; q8_0 needs half the memory of f16.",
    ),
    int_option(
        "--checkpoints",
        least=0,
        most=64,
        default=session_defaults.NUM_CHECKPOINTS,
        metavar="N",
        help="Checkpoints of each session in models with recurrent layers; with 0 they do not speculate.",
    ),
    choice_option(
        "--wire",
        choices=("f32", "f16", "q8", "auto"),
        default=session_defaults.WIRE,
        help="Format of hidden states between hosts: exact, half the bytes, about a quarter, or chosen per "
        "link.",
    ),
    int_option(
        "--max-waiting",
        default=session_defaults.MAX_WAITING,
        metavar="N",
        help="Limit of waiting requests; more are rejected with 429.",
    ),
    click.option("--exact", is_flag=True, help="Exact mode: a text never depends on what else is computed."),
)
# Their help stands in these groups, of both commands.
SESSION_FLAGS: Final = ("--ctx-size", "--parallel", "--kv-type", "--checkpoints", "--exact", "--wire")
SPECULATION_FLAGS: Final = (
    *("--speculate", "--draft", "--no-draft-head", "--draft-max", "--draft-min", "--p-min"),
    *("--draft-threads", "--draft-gpu-layers", "--draft-kv-type", "--draft-context", "--draft-wire"),
    *("--spec-history", "--spec-width", "--spec-depth"),
    *("--no-spec-cancel", "--replay-file", "--replay-rates"),
)


def check_stage_options(stages: int | None, split: tuple[int, ...] | None) -> None:
    """Refuse options that contradict one another.

    Raises:
        click.UsageError: Naming the one to leave out.
    """
    if stages is not None and split is not None:
        raise click.UsageError("--split gives the number of stages: leave out --stages")


# Of every host.
storage_options: Final = option_group(
    click.option(
        "--models",
        "models_dir",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        metavar="DIR",
        help="GGUF files on this host, whose layers need no transfer.",
    ),
    click.option(
        "--cache-size",
        "cache_bytes",
        type=MemorySize(),
        metavar="SIZE",
        help="Limit of stage files on this host's disk; the least recently used are removed first.",
    ),
    click.option(
        "--kv-disk",
        "kv_disk_bytes",
        type=DiskSize(),
        metavar="SIZE|none",
        help="Keep the KV cache of prompts and answers on disk, up to SIZE on each host, so that it outlives "
        "the processes; a host's own option wins.  [default: none]",
    ),
)
# Of the head.
weights_options: Final = option_group(
    click.option(
        "--transfer-rate",
        type=MemorySize(),
        metavar="SIZE",
        help="Limit of bytes per second sent to all hosts together, such as 50M.",
    ),
    click.option(
        "--hub-first",
        is_flag=True,
        help="Hosts fetch from the hub before this host, if the model came from there.",
    ),
    storage_options,
)


def storage_from(
    *, models_dir: Path | None, cache_bytes: int | None, kv_disk_bytes: int | None
) -> StorageOptions:
    """What the user says; processes that are started from now on know it."""
    from stages.weights.disk_cache import StorageOptions  # noqa: PLC0415 - keeps --help quick

    models = models_dir.absolute() if models_dir is not None else None
    storage = StorageOptions(models, cache_bytes, kv_disk_bytes)
    storage.to_environment()
    return storage


def weights_from(
    pulled: PulledModel,
    *,
    models_dir: Path | None,
    cache_bytes: int | None,
    kv_disk_bytes: int | None,
    transfer_rate: int | None,
    hub_first: bool,
) -> WeightsOptions:
    """What the user of `mesh serve` says."""
    from mesh.serve.options import WeightsOptions  # noqa: PLC0415 - keeps --help quick

    storage_from(models_dir=models_dir, cache_bytes=cache_bytes, kv_disk_bytes=kv_disk_bytes)
    return WeightsOptions(transfer_rate, pulled.hub, hub_first)


head_options: Final = option_group(
    click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="URL of the mesh's API."),
    click.option(
        "--api-key-file",
        type=_FILE,
        help=f"File whose first key is sent to the API; or set {API_KEY}.",
    ),
)


def key_of(api_key_file: Path | None) -> str | None:
    """The key that the user means.

    Raises:
        ClusterError: If the file holds none, or the key cannot be sent.
    """
    if api_key_file is not None:
        return sendable_key(read_first_key(api_key_file), str(api_key_file), param="--api-key-file")
    key = os.environ.get(API_KEY)
    # Files of variables that were written on Windows leave the end of the line in it.
    return None if key is None else sendable_key(key.strip(), API_KEY)


def local_model(model: Path) -> PulledModel:
    """A model on this host.

    Args:
        model: A file, the first if there are several, or `hf:org/repo:QUANT`.

    Raises:
        ModelError: If it is at the hub, and cannot be had there.
    """
    from mesh.hub import HubLibrary, PulledModel, is_reference, parse_reference  # noqa: PLC0415
    from mesh.util.progress import progress_bars  # noqa: PLC0415
    from stages.weights.disk_cache import default_root  # noqa: PLC0415

    if not is_reference(str(model)):
        return PulledModel(model, ())
    reference = parse_reference(str(model))
    with progress_bars() as bars:
        return HubLibrary(default_root()).pull(reference, _in_bytes(bars))


def _in_bytes(bars: ProgressBars) -> Callable[[str], Callable[[int, int], None]]:
    def begin(label: str) -> Callable[[int, int], None]:
        bar = bars.add(label)
        return lambda done, total: bar(done / total if total else 1.0)

    return begin
