"""Progress where there is no terminal: few events, the end among them."""

from structlog.testing import capture_logs

from mesh.util.terminal import EventTask


class Clock:
    """Seconds that pass when told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_long_work_is_reported_now_and_then_and_at_its_end() -> None:
    clock = Clock()
    task = EventTask("cutting", clock)
    with capture_logs() as logs:
        for step in range(101):
            clock.now_s = step * 0.12
            task(step / 100)
        task(1.0)
    assert [(entry["task"], entry["percent"]) for entry in logs] == [
        ("cutting", 42),
        ("cutting", 84),
        ("cutting", 100),
    ]


def test_short_work_is_reported_once() -> None:
    task = EventTask("cutting", Clock())
    with capture_logs() as logs:
        for step in range(11):
            task(step / 10)
    assert [entry["percent"] for entry in logs] == [100]


def test_what_goes_on_may_change_its_name() -> None:
    task = EventTask("fetching", Clock())
    with capture_logs() as logs:
        task(1.0)
        task(0.5, "loading")
        task(1.0, "loading")
    assert [entry["task"] for entry in logs] == ["fetching", "loading"]
