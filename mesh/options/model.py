"""Options of a served model: those of `mesh serve` and `mesh load`, of `/mesh/load` and of saved states."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, Strict, WithJsonSchema

from mesh.options.option import Option, Options
from spanmesh_proto.errors import InvalidRequest
from speculative.controller import ControllerOptions
from speculative.draft import defaults
from stages.runtime.kv_types import KV_TYPES

if TYPE_CHECKING:
    from speculative.draft.context import DraftOptions
    from stages.transport.hidden_codec import HiddenType

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_DEFAULT: Final = "default"
_MOST_CHARS: Final = 4096
_MOST_LAYERS: Final = 4096
SESSIONS: Final = "Sessions"
SPECULATION: Final = "Speculation"
PLACEMENT: Final = "Placement"
API: Final = "API"
AUTO: Final = "auto"
"""Projector: the one beside a model of the hub, if there is one."""
NONE: Final = "none"
"""Projector: none."""
# Options of embedding models; the others are of models that generate text.
_OF_EMBEDDINGS: Final = frozenset({"model", "name", "embeddings", "ctx_size", "threads", "max_waiting"})

OnePath = Annotated[
    Path,
    Strict(strict=False),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": _MOST_CHARS}),
]
"""A path; a text in JSON."""
LayerCounts = Annotated[
    tuple[Annotated[int, Field(ge=1, le=_MOST_LAYERS)], ...],
    Strict(strict=False),
    Field(min_length=1, max_length=_MOST_LAYERS),
]
"""Layers of each stage."""
WireType = Literal["f32", "f16", "q8"]
"""Formats of hidden states, those of `HiddenType`."""


def _known(kv_type: str) -> str:
    if kv_type not in KV_TYPES:
        raise ValueError(f"must be one of {', '.join(KV_TYPES)}")
    return kv_type


KvType = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"enum": list(KV_TYPES)})]
"""Name of a format of KV caches."""


class ModelOptions(Options):
    """Options of one served model; fields are named as in JSON."""

    model_config = ConfigDict(strict=True)

    speculate: Annotated[
        Literal["auto", "off", "ngram", "draft", "replay"],
        Option(
            section=SPECULATION,
            help="Proposer of tokens that the model verifies; auto uses all available ones where they pay.",
        ),
    ] = "auto"
    draft_path: Annotated[
        OnePath | None,
        Option(
            section=SPECULATION,
            flag="--draft",
            metavar="FILE",
            help="Drafter, a GGUF file or hf:org/repo:NAME: a small model, EAGLE-3, DFlash, DSpark, a head "
            "for multi-token prediction, or an assistant of Gemma 4.",
        ),
    ] = None
    draft_head: Annotated[
        bool,
        Option(
            section=SPECULATION,
            flag="--no-draft-head",
            is_denial=True,
            help="Do not draft with MODEL's own head for multi-token prediction.",
        ),
    ] = True
    draft_max: Annotated[
        int,
        Field(ge=1, le=1024),
        Option(section=SPECULATION, metavar="N", help="Maximum of tokens drafted ahead."),
    ] = defaults.DRAFT_MAX
    draft_min: Annotated[
        int,
        Field(ge=1, le=1024),
        Option(section=SPECULATION, metavar="N", help="Minimum of tokens of a draft."),
    ] = defaults.DRAFT_MIN
    p_min: Annotated[
        float,
        Field(ge=0, le=1),
        Option(section=SPECULATION, metavar="P", help="Probability below which a draft ends."),
    ] = defaults.P_MIN
    # They spin, so no more than cores that no stage uses.
    draft_threads: Annotated[
        int,
        Field(ge=1, le=1024),
        Option(section=SPECULATION, metavar="N", help="Threads of the draft model."),
    ] = defaults.NUM_THREADS
    draft_gpu_layers: Annotated[
        int,
        Field(ge=-1, le=_MOST_LAYERS),
        Option(section=SPECULATION, metavar="N", help="Layers of the draft model on the GPU, -1 for all."),
    ] = defaults.NUM_GPU_LAYERS
    draft_kv_type: Annotated[
        KvType, Option(section=SPECULATION, help="Format of the draft model's KV cache.")
    ] = defaults.KV_TYPE
    # Acceptance does not grow with more positions of a prompt than these.
    draft_context: Annotated[
        int,
        Field(ge=1, le=2**20),
        Option(
            section=SPECULATION,
            metavar="N",
            is_rare=True,
            help="Last positions of a prompt whose hidden states a drafter reads.",
        ),
    ] = defaults.CONTEXT
    draft_wire: Annotated[
        Literal[WireType, "auto"],
        Option(
            section=SPECULATION,
            is_rare=True,
            help="Format of these hidden states between hosts; auto is f16, from four layers on q8.",
        ),
    ] = defaults.WIRE
    keeps_history: Annotated[
        bool,
        Option(
            section=SPECULATION,
            flag="--spec-history",
            help="Also propose from earlier answers to the same API key.",
        ),
    ] = False
    width: Annotated[
        int | None,
        Field(ge=0, le=1024),
        Option(
            section=SPECULATION,
            flag="--spec-width",
            metavar="N",
            is_rare=True,
            help="Always propose N tokens per window.",
        ),
    ] = None
    depth: Annotated[
        int | None,
        Field(ge=1, le=1024),
        Option(
            section=SPECULATION,
            flag="--spec-depth",
            metavar="N",
            is_rare=True,
            help="Always keep N windows in flight.",
        ),
    ] = None
    cancels: Annotated[
        bool,
        Option(
            section=SPECULATION,
            flag="--no-spec-cancel",
            is_denial=True,
            is_rare=True,
            help="Do not notify hosts at once of windows that a rejection voided.",
        ),
    ] = True
    replay_path: Annotated[
        OnePath | None,
        Option(
            section=SPECULATION,
            flag="--replay-file",
            metavar="PATH",
            is_rare=True,
            help="For benchmarks: recorded answers that --speculate replay proposes.",
        ),
    ] = None
    replay_rates: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], ...],
        Strict(strict=False),
        Field(max_length=64),
        Option(
            section=SPECULATION,
            kind="shares",
            metavar="A,B,…",
            is_rare=True,
            help="For benchmarks: replay stands for a drafter of this acceptance, by distance.",
        ),
    ] = ()
    stages: Annotated[
        int | None,
        Field(ge=1, le=_MOST_LAYERS),
        Option(
            section=PLACEMENT,
            metavar="N",
            is_of_stages=True,
            help="Cut the model into N stages.  [default: the planner's choice]",
        ),
    ] = None
    split: Annotated[
        LayerCounts | None,
        Option(
            section=PLACEMENT,
            kind="layer counts",
            metavar="A,B,…",
            is_of_stages=True,
            help="Layers of each stage, such as 10,10,10.",
        ),
    ] = None
    mmproj: Annotated[
        str,
        Field(min_length=1, max_length=_MOST_CHARS),
        Option(
            section=SESSIONS,
            metavar="FILE",
            help="Projector with which MODEL reads pictures, a GGUF file or hf:org/repo:NAME; auto is the "
            "one beside a model of the hub, none reads text only.",
        ),
    ] = AUTO
    mmproj_host: Annotated[
        str,
        Field(min_length=1, max_length=_MOST_CHARS),
        Option(
            section=SESSIONS,
            metavar="HOST",
            help="Host on which the projector computes, by its name; auto is one with a GPU for it, if there "
            "is one, head the processors of the head, which take over while a host is lost.",
        ),
    ] = AUTO
    image_max_tokens: Annotated[
        int,
        Field(ge=1, le=4096),
        Option(
            section=SESSIONS,
            metavar="N",
            help="Most tokens of a picture, where the projector takes any size: larger ones are scaled down.",
        ),
    ] = 1024
    picture_rows_bytes: Annotated[
        int | None,
        Field(ge=0, le=2**40),
        Option(
            section=SESSIONS,
            kind="size",
            metavar="SIZE",
            help="Memory of the head for rows of pictures that were sent to stages; beyond it the oldest are "
            "computed again if a stage is lost.  [default: 1G]",
        ),
    ] = None
    ctx_size: Annotated[
        int | None,
        Field(ge=16, le=2**31),
        Option(
            section=SESSIONS,
            metavar="N",
            help="Positions of one session, prompt and answer together.  [default: as memory allows, at most "
            "the model's and 131072]",
        ),
    ] = None
    parallel: Annotated[
        int, Field(ge=1, le=64), Option(section=SESSIONS, metavar="N", help="Concurrent sessions.")
    ] = 4
    kv_type: Annotated[
        KvType,
        Option(section=SESSIONS, help="Format of the KV caches; q8_0 needs half the memory of f16."),
    ] = "f16"
    checkpoints: Annotated[
        int,
        Field(ge=0, le=64),
        Option(
            section=SESSIONS,
            metavar="N",
            help="Checkpoints of each session in models with recurrent layers; with 0 they do not speculate.",
        ),
    ] = 8
    exact: Annotated[
        bool,
        Option(
            section=SESSIONS,
            is_of_stages=True,
            help="Exact mode: a text never depends on what else is computed.",
        ),
    ] = False
    wire: Annotated[
        Literal[WireType, "auto"],
        Option(
            section=SESSIONS,
            is_of_stages=True,
            help="Format of hidden states between hosts: exact, half the bytes, about a quarter, or chosen "
            "per link.",
        ),
    ] = "f32"
    max_waiting: Annotated[
        int,
        Field(ge=1, le=2**20),
        Option(section=API, metavar="N", help="Limit of waiting requests; more are rejected with 429."),
    ] = 64

    def require_consistent(self) -> None:
        """Check that no options contradict one another.

        Raises:
            InvalidRequest: Naming one of them.
        """
        super().require_consistent()
        if self.stages is not None and self.split is not None:
            raise InvalidRequest("--split gives the number of stages: leave out --stages", param="stages")
        if self.speculate == "replay" and self.replay_path is None:
            raise InvalidRequest(
                "--speculate replay needs recorded answers: name their file with --set replay-file=PATH",
                param="replay_path",
            )
        if self.replay_rates and self.replay_path is None:
            raise InvalidRequest(
                "--set replay-rates makes recorded answers less certain: name their file with --set "
                "replay-file=PATH",
                param="replay_rates",
            )
        if self.draft_min > self.draft_max:
            raise InvalidRequest(
                f"--draft-min is {self.draft_min}: it must be from 1 to --draft-max, {self.draft_max}",
                param="draft_min",
            )

    @property
    def projector_path(self) -> Path | None:
        """Projector for pictures, once it is known where it is; None for a model that reads text only."""
        return None if self.mmproj in {AUTO, NONE} else Path(self.mmproj)

    @property
    def hidden_type(self) -> HiddenType | None:
        """Format of hidden states between stages; None lets each link's bandwidth decide."""
        from stages.transport.hidden_codec import HiddenType  # noqa: PLC0415 - brings numpy

        return None if self.wire == "auto" else HiddenType(self.wire)

    def feature_type(self, num_layers: int) -> HiddenType:
        """Format of hidden states for a drafter that reads them of this many layers."""
        from stages.transport.hidden_codec import HiddenType  # noqa: PLC0415 - brings numpy

        if self.draft_wire != "auto":
            return HiddenType(self.draft_wire)
        return HiddenType.F16 if num_layers <= defaults.MOST_LAYERS_IN_F16 else HiddenType.Q8

    @property
    def may_draft(self) -> bool:
        """Whether a draft model, or the model's own head, may draft."""
        return self.speculate in {"auto", "draft"} and (self.draft_path is not None or self.draft_head)

    def draft_options(self, ctx_size: int) -> DraftOptions:
        """Options of the draft model.

        Args:
            ctx_size: Positions of one session.
        """
        from speculative.draft.context import DraftOptions  # noqa: PLC0415 - brings llama.cpp

        return DraftOptions(
            draft_max=self.draft_max,
            draft_min=self.draft_min,
            p_min=self.p_min,
            ctx_size=ctx_size,
            num_sessions=self.parallel,
            num_threads=self.draft_threads,
            num_gpu_layers=self.draft_gpu_layers,
            kv_type=self.draft_kv_type,
        )

    def controller_options(self) -> ControllerOptions:
        """Options of each session's controller."""
        return ControllerOptions(fixed_width=self.width, fixed_depth=self.depth)


class LoadRequest(ModelOptions):
    """Model to be served beside the others, and its options, named as those of `mesh load`."""

    model: Annotated[
        str,
        Field(
            min_length=1,
            max_length=_MOST_CHARS,
            description="A GGUF file on the head's host, as an absolute path, or a name in the library.",
        ),
    ]
    name: Annotated[
        str | None,
        Field(max_length=128, description="Name of the model in the API."),
        Option(section=API, help="Name of the model in the API.  [default: the name of its file]"),
    ] = None
    embeddings: Annotated[
        bool,
        Field(description="Serve an embedding model, on one host."),
        Option(
            section=API,
            help="Load an embedding model, whole on one host, and serve it at /v1/embeddings. Of the other "
            "options only --name, --ctx-size, --threads and --max-waiting apply.",
        ),
    ] = False
    threads: Annotated[
        int | None,
        Field(ge=1, le=1024),
        Option(
            section=PLACEMENT,
            metavar="N",
            help="Threads of each host for the model.  [default: those that no other model uses, at least "
            "one]",
        ),
    ] = None
    evictable: Annotated[
        bool,
        Field(description="Whether it is unloaded when it idles and its memory is wanted."),
        Option(
            section=PLACEMENT,
            help="Unload it when it idles and its memory is wanted, as models of `mesh serve --library`.",
        ),
    ] = False

    def require_consistent(self) -> None:
        """Check that no options contradict one another.

        Raises:
            InvalidRequest: Naming one of them, or one that does not apply to an embedding model.
        """
        super().require_consistent()
        if not self.embeddings:
            return
        for name in self.model_fields_set - _OF_EMBEDDINGS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise InvalidRequest(f"{name} does not apply to an embedding model: leave it out", param=name)

    @property
    def served_name(self) -> str:
        """Model name for clients.

        Raises:
            InvalidRequest: If it cannot be a name, or means the first model.
        """
        from stages.gguf import model_name  # noqa: PLC0415 - keeps --help quick

        name = model_name(Path(self.model)) if self.name is None else self.name
        if name == _DEFAULT or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"a model cannot be called {name!r}: `{_DEFAULT}` means the first one, and a name is 1 to "
                "128 letters, digits and any of ._:/@+-, the first a letter or a digit; choose one with "
                "--name",
                param="name",
            )
        return name


def model_options_in(options: ModelOptions) -> dict[str, Any]:
    """The options of a model that a larger set of options holds, by field."""
    return {name: getattr(options, name) for name in ModelOptions.model_fields}
