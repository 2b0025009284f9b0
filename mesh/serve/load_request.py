"""Options of `mesh load`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mesh.serve.options import SpeculationOptions, WeightsOptions
from spanmesh_proto.errors import InvalidRequest
from stages.gguf.reader import model_name
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from mesh.engine import SpeculationMode
    from mesh.serve.options import ServeOptions

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_DEFAULT: Final = "default"


@dataclass(frozen=True)
class LoadRequest:
    """Fit for JSON. The fields are named as the options of `mesh load` are, which tell what they mean.

    Attributes:
        model: The GGUF file, as the head's host sees it.
        name: What clients call it; None for the name of the file.
        ctx_size: Positions of one session, or None for the model's own, at most 4096.
        parallel: Sessions at once.
        kv_type: Format of the KV caches.
        wire: How hidden states travel: `f32`, `f16`, `q8`, or `auto`.
        max_waiting: Requests that may wait for a session.
        exact: Whether to compute so that text does not depend on the batch.
        stages: How many stages, or None to let the plan decide.
        split: Layers of each stage, or None to let the plan decide.
        threads: Of each host for this model, or None for those that no other model computes with.
        speculate: Who proposes tokens; this and what follows as in `SpeculationOptions`.
        draft_path: Likewise.
        draft_max: Likewise.
        draft_min: Likewise.
        p_min: Likewise.
        draft_threads: Likewise.
        draft_gpu_layers: Likewise.
        draft_kv_type: Likewise.
        keeps_history: Likewise.
        width: Likewise.
        depth: Likewise.
        cancels: Likewise.
        replay_path: Likewise.
    """

    model: str
    name: str | None = None
    ctx_size: int | None = None
    parallel: int = 4
    kv_type: str = "f16"
    wire: str = "f32"
    max_waiting: int = 64
    exact: bool = False
    stages: int | None = None
    split: tuple[int, ...] | None = None
    threads: int | None = None
    speculate: SpeculationMode = "auto"
    draft_path: str | None = None
    draft_max: int = 8
    draft_min: int = 1
    p_min: float = 0.0
    draft_threads: int = 1
    draft_gpu_layers: int = -1
    draft_kv_type: str = "f16"
    keeps_history: bool = False
    width: int | None = None
    depth: int | None = None
    cancels: bool = True
    replay_path: str | None = None

    @property
    def served_name(self) -> str:
        """What clients call the model.

        Raises:
            InvalidRequest: If that cannot be a name, or means the first model.
        """
        name = model_name(Path(self.model)) if self.name is None else self.name
        if name == _DEFAULT or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"a model cannot be called {name!r}: `{_DEFAULT}` means the first one, and a name is 1 to "
                "128 letters, digits and any of ._:/@+-, the first a letter or a digit; choose one with "
                "--name",
                param="name",
            )
        return name

    def options(self, head: ServeOptions) -> ServeOptions:
        """As `mesh serve` would have them; what concerns the head and its host stays.

        Args:
            head: What the head was started with.

        Raises:
            ClusterError: If options contradict one another.
        """
        return replace(
            head,
            model=Path(self.model),
            num_hosts=0,
            num_stages=self.stages,
            split=self.split,
            topology=None,
            ctx_size=self.ctx_size,
            num_slots=self.parallel,
            kv_type=self.kv_type,
            max_waiting=self.max_waiting,
            speculation=self._speculation(),
            is_exact=self.exact,
            wire=None if self.wire == "auto" else HiddenType(self.wire),
            # Its promise was measured on processors.
            gpu_layers=None if self.exact else head.gpu_layers,
            weights=WeightsOptions(head.weights.transfer_bytes_per_s),
        )

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return asdict(self)

    def _speculation(self) -> SpeculationOptions:
        return SpeculationOptions(
            mode=self.speculate,
            width=self.width,
            depth=self.depth,
            cancels=self.cancels,
            draft_path=None if self.draft_path is None else Path(self.draft_path),
            draft_max=self.draft_max,
            draft_min=self.draft_min,
            p_min=self.p_min,
            draft_threads=self.draft_threads,
            draft_gpu_layers=self.draft_gpu_layers,
            draft_kv_type=self.draft_kv_type,
            replay_path=None if self.replay_path is None else Path(self.replay_path),
            keeps_history=self.keeps_history,
        )


def parse_load_request(fields: dict[str, Any]) -> LoadRequest:
    """An order from JSON, checked before.

    Raises:
        TypeError: If a field is unknown, or `model` is missing.
    """
    split = fields.get("split")
    return LoadRequest(**fields | {"split": None if split is None else tuple(split)})
