"""Everything that one model has for itself: what is asked of it, its stages, its engine, its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.coordinator.coordinator import PendingEngine
from mesh.serve.fleet import Fleet
from mesh.serve.state import MeshState
from mesh.serve.succession import setup_of
from mesh.serve.transfers import Transfers

if TYPE_CHECKING:
    from mesh.serve.load_order import LoadOrder
    from mesh.serve.options import ServeOptions
    from mesh.serve.preflight import Preflight


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One model, from the first look at its file to its last stage's end.

    Attributes:
        name: What clients call it.
        options: What the user says, fitted to the model.
        known: What was found out beforehand.
        engine: Answers, once it can.
        state: What is going on.
        fleet: Its stages.
        setup: Fingerprint of all that its stages are loaded with.
        order: What `mesh load` asked for; None for the model that `mesh serve` was started with.
    """

    name: str
    options: ServeOptions
    known: Preflight
    engine: PendingEngine
    state: MeshState
    fleet: Fleet
    setup: str
    order: LoadOrder | None = None


def new_model(
    name: str,
    options: ServeOptions,
    known: Preflight,
    *,
    order: LoadOrder | None = None,
    transfers: Transfers | None = None,
) -> ServedModel:
    """A model of which nothing runs yet.

    Args:
        name: What clients call it.
        options: What the user says, fitted to the model.
        known: What was found out beforehand.
        order: What `mesh load` asked for, if it did.
        transfers: Notes what is brought to hosts; new unless given.
    """
    engine = PendingEngine(known.workload.ctx_size)
    state = MeshState(
        known.model,
        engine,
        numeric_mode="exact" if options.is_exact else "fast",
        speculation_mode=options.speculation.mode,
        transfers=transfers or Transfers(),
    )
    return ServedModel(name, options, known, engine, state, Fleet(), setup_of(options, known), order)
