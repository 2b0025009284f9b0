"""Recorder that the options ask for: what it records, of which keys, and why it cannot."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from mesh.api.api_keys import read_key_file
from mesh.coordinator.feature_store import FeatureNeeds
from mesh.tuning.recorder import CONTEXT, MOST_ANSWER_BYTES, Recorder
from mesh.tuning.recording import RecordingHeader, recorded_model
from mesh.tuning.recording_folder import RecordingFolder, RecordingLimits
from mesh.tuning.tuned_folder import TunedFolder
from spanmesh_proto.addresses import is_loopback
from spanmesh_proto.errors import ClusterError, MeshError
from speculative.proposer import DrafterKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from mesh.options.host import HeadOptions
    from mesh.serve.preflight import Preflight
    from stages.slicing.model_facts import ModelFacts

# Of drafters of the EAGLE-3 kind: the second layer, the middle, and the third from the end.
_FIRST_TAP: Final = 2
_LAST_TAP: Final = 3
# Age of a key file that counts as written to its end.
_SETTLED_S: Final = 1.0

log = structlog.get_logger()


@dataclass(frozen=True)
class OpenRecorder:
    """A recorder, and what is read for it where no drafter reads anything."""

    recorder: Recorder
    """Writes answers."""
    needs: FeatureNeeds
    """Hidden states that are recorded."""


class AgreedKeys:
    """Groups of the keys that may be recorded, as their file has them now. For any thread.

    Args:
        path: The key file; None if there is none.
        now_s: Wall clock, Unix seconds.
    """

    def __init__(self, path: Path | None, now_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now_s = now_s
        # Together, so that no thread sees one with another's.
        self._read: tuple[tuple[int, ...], Mapping[str, str | None] | None] = ((), None)

    def __call__(self) -> Mapping[str, str | None] | None:
        """The group of each key, None for none, by its digest in hex.

        It is what was read last while the file cannot be read, and None without one. A key that has just gone
        from the file is still named: an editor may be writing, and what is erased does not come back.
        """
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp != self._read[0]:
                records = read_key_file(self._path)
                groups = {record.digest.hex(): record.group for record in records if record.may_record}
                former = self._read[1] or {}
                if former.keys() - groups.keys() and 0.0 <= self._now_s() - stat.st_mtime < _SETTLED_S:
                    return {**former, **groups}
                self._read = (stamp, groups)
        except (OSError, MeshError):
            # Its requests are refused meanwhile; no key counts as removed.
            self._read = ((), self._read[1])
        return self._read[1]


@contextmanager
def open_recorder(options: HeadOptions, known: Preflight) -> Iterator[OpenRecorder | None]:
    """The recorder of a model's answers; None if none are recorded.

    Raises:
        ClusterError: If options contradict one another, the folder is in use, or its limit does not fit.
        ModelError: If the folder holds another recording, or is readable by others.
    """
    if options.record_path is None:
        yield None
        return
    if known.api_keys is None and not is_loopback(options.host):
        raise ClusterError(
            f"--record where other machines ask, at {options.host}, needs API keys, since a key alone can "
            "agree to it: `mesh keys add NAME --may-record` makes one; or listen on 127.0.0.1",
            param="--record",
        )
    needs = _needs(options, known)
    layers = tuple(layer + 1 for layer in needs.layers)
    header = RecordingHeader(recorded_model(options.model), layers)
    context_bytes = known.workload.ctx_size * header.shape.row_bytes
    path, agreed = options.record_path.absolute(), AgreedKeys(options.api_key_path)
    folder = RecordingFolder(
        path,
        header,
        RecordingLimits(options.most_record_bytes, options.record_days),
        one_bytes=min(context_bytes, MOST_ANSWER_BYTES),
    )
    recorder = Recorder(
        folder,
        header.shape,
        lambda: _agreed_once_erased(agreed, TunedFolder(path)),
        most_bytes=options.most_record_bytes,
    )
    log.info("recording", folder=str(options.record_path), layers=layers, row_bytes=header.shape.row_bytes)
    try:
        yield OpenRecorder(recorder, needs)
    finally:
        recorder.close()


def _agreed_once_erased(keys: AgreedKeys, tuned: TunedFolder) -> frozenset[str] | None:
    """Digests of the keys that may be recorded, once the drafters that learned from others are erased.

    Raises:
        ModelError: If one cannot be erased.
    """
    groups = keys()
    if groups is not None and (num_erased := tuned.erase_others(groups)):
        log.info("tuned_drafters_erased", number=num_erased)
    return None if groups is None else frozenset(groups)


def _needs(options: HeadOptions, known: Preflight) -> FeatureNeeds:
    """Hidden states that are recorded: those that the drafter reads, or those of `--tap-layers`."""
    model, drafter = known.model, known.drafter
    if drafter is not None and drafter.kind is DrafterKind.MTP:
        raise ClusterError(
            f"--record: heads for multi-token prediction such as that of {drafter.path.name} are not tuned: "
            "serve the model without it, or leave --record out",
            param="--record",
        )
    if model.n_streams > 1:
        raise ClusterError(
            f"--record: the hidden states of {model.architecture} have {model.n_streams} streams, which no "
            "drafter reads: leave it out",
            param="--record",
        )
    if drafter is None or not drafter.reads_features:
        return FeatureNeeds(_taps(options, model), model.n_layers, model.n_embd, context=CONTEXT)
    layers = tuple(layer + 1 for layer in drafter.layers)
    if options.tap_layers not in {(), layers}:
        raise ClusterError(
            f"--tap-layers names other layers than {drafter.path.name} reads, which are "
            f"{','.join(map(str, layers))}: leave it out",
            param="--tap-layers",
        )
    return FeatureNeeds(
        drafter.layers,
        model.n_layers,
        drafter.n_embd,
        options.feature_type(len(drafter.layers)),
        options.draft_context,
    )


def _taps(options: HeadOptions, model: ModelFacts) -> tuple[int, ...]:
    """Layers whose outputs are recorded where no drafter reads any."""
    n_layers = model.n_layers
    inputs = options.tap_layers or (_FIRST_TAP, n_layers // 2, n_layers - _LAST_TAP)
    if list(inputs) != sorted(set(inputs)) or not all(1 <= layer < n_layers for layer in inputs):
        remedy = f"name layers from 1 to {n_layers - 1} with --tap-layers, in ascending order"
        raise ClusterError(
            f"the inputs of layers {','.join(map(str, inputs))} cannot be recorded of {model.name}: {remedy}",
            param="--tap-layers",
        )
    return tuple(layer - 1 for layer in inputs)
