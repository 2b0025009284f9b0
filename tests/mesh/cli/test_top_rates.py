"""What `mesh top` makes of two looks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from mesh.cli.top import pace_between, view
from mesh.status import (
    ChatModelStatus,
    HostStatus,
    MeshStatus,
    ModelDescription,
    PrefillStatus,
    RecordingStatus,
    SessionsStatus,
    SpeculationStatus,
    StageStatus,
    WindowTimes,
)

HOST = HostStatus(name="a", address="10.0.0.1", ready=True, layers="[0, 10)", memory_bytes=2**30)


def status(windows: int, compute_ms: float, *, accepted: int = 0, address: str = "10.0.0.1:5") -> MeshStatus:
    stage = StageStatus(
        host="a",
        address=address,
        layers=(0, 10),
        windows=windows,
        mean_compute_ms=compute_ms,
        mean_queue_ms=0.5,
    )
    speculation = SpeculationStatus(
        mode="auto",
        windows=windows,
        proposed=2 * windows,
        accepted=accepted,
        tokens_per_window=1.5,
        acceptance_per_position=(0.75, 0.5),
        mean_window_ms=WindowTimes(network=4.0),
    )
    return MeshStatus(
        model=ModelDescription(name="m", numeric_mode="fast"),
        ready=True,
        phase="serving",
        hosts=(HOST,),
        stages=(stage,),
        sessions=sessions(),
        speculation=speculation,
    )


def sessions(*prefill: tuple[int, int]) -> SessionsStatus:
    """With prompts that are being read: tokens read so far, and of the prompt."""
    reading = tuple(PrefillStatus(read=read, prompt=prompt) for read, prompt in prefill)
    return SessionsStatus(running=1, waiting=2, slots=4, prefill=reading)


def test_the_first_look_tells_means_of_all_time() -> None:
    pace = pace_between(None, status(100, 2.0, accepted=150), 0.0)
    assert pace.stages[0].compute_ms == 2.0
    assert pace.stages[0].busy is None
    assert pace.tokens_per_s is None
    assert pace.acceptance == pytest.approx(0.75)
    assert not pace.is_recent


def test_the_second_tells_what_happened_since() -> None:
    # 100 windows of 2 ms before, then 50 of 5 ms within a second.
    now = status(150, 3.0, accepted=200)
    pace = pace_between(status(100, 2.0, accepted=150), now, 1.0)
    (stage,) = pace.stages
    assert stage.compute_ms == pytest.approx(5.0)
    assert stage.busy == pytest.approx(0.25)
    assert stage.windows_per_s == pytest.approx(50.0)
    assert pace.tokens_per_s == pytest.approx(75.0)
    assert pace.acceptance == pytest.approx(0.5)
    assert pace.wire_ms == pytest.approx(4.0)


def test_a_pause_is_no_work() -> None:
    now = status(100, 2.0)
    pace = pace_between(now, now, 1.0)
    assert (pace.tokens_per_s, pace.stages[0].busy, pace.is_recent) == (0.0, 0.0, False)


@pytest.mark.parametrize("before", [status(500, 2.0), status(10, 2.0, address="10.0.0.2:5")])
def test_a_ring_made_anew_is_looked_at_for_the_first_time(before: MeshStatus) -> None:
    assert pace_between(before, status(100, 2.0), 1.0).tokens_per_s is None


def test_the_picture_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    now = status(150, 3.0, accepted=200)
    now.recording = RecordingStatus(conversations=12, tokens=3400, off="disk full")
    pace = pace_between(status(100, 2.0, accepted=150), now, 1.0)
    Console(width=160).print(view(now, pace, {("a", "head"): 1.25}, "head"))
    shown = capsys.readouterr().out
    for piece in (
        "m, fast: ready; sessions: 1 of 4, 2 waiting",
        "[0, 10)",
        "5.00",
        "1.25 head",
        "##",
        "75.0 tokens/s",
        "recording: 12 answers of 3,400 tokens",
        "off: disk full",
    ):
        assert piece in shown
    assert "50% accepted, 1.50 tokens a window" in shown
    assert "by position: 0.75 0.50" in shown


def test_prompts_that_are_being_read_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    now = status(150, 3.0)
    pace = pace_between(None, now, 1.0)
    for prefill, line in (
        ([], ""),
        (
            [(16, 64), (8192, 32768)],
            "reading prompts: 8,192 of 32,768 tokens (25%), 16 of 64 tokens (25%)\n",
        ),
        ([(0, 9)] * 6, "0 of 9 tokens (0%) and 2 more\n"),
    ):
        now.sessions = sessions(*prefill)
        Console(width=160).print(view(now, pace, {}, "head"))
        shown = capsys.readouterr().out
        assert line in "".join(f"{each.rstrip()}\n" for each in shown.splitlines())
        assert ("reading prompts" in shown) is bool(prefill)


def test_prompts_of_every_model_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    now = status(150, 3.0)
    now.models = (
        ChatModelStatus(name="big", sessions=sessions((8, 64))),
        ChatModelStatus(name="small", sessions=sessions((50, 100))),
        ChatModelStatus(name="new"),
    )
    Console(width=160).print(view(now, pace_between(None, now, 1.0), {}, "head"))
    shown = capsys.readouterr().out
    assert "reading prompts: small 50 of 100 tokens (50%), big 8 of 64 tokens (12%)\n" in "".join(
        f"{each.rstrip()}\n" for each in shown.splitlines()
    )


def test_a_mesh_that_still_starts_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    starting = MeshStatus(
        model=ModelDescription(name="m", numeric_mode="fast"),
        ready=False,
        phase="waiting for 2 of 2 hosts",
        hosts=(replace(HOST, layers="", ready=False),),
    )
    Console(width=120).print(view(starting, pace_between(None, starting, 0.0), {}, ""))
    shown = capsys.readouterr().out
    assert "waiting for 2 of 2 hosts" in shown
    assert "starting" in shown
