"""Which tests are tried twice: those that need several hosts or a quiet machine. A plugin of pytest.

Every run keeps the names of what failed. `pytest --second-try` runs just those once more, with nothing beside
them, and names them at the end. It refuses if one of them is not marked so, or if they are too many: then the
machine is not the reason. A test that ended its process counts as one without marks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

MARKS: Final = ("cluster", "lab", "quiet")
MOST: Final = 2
# In pytest's cache: what failed last, with whether it may be tried again, and what was tried twice.
_FAILED: Final = "spanmesh/failed"
_TRIED_TWICE: Final = "spanmesh/tried_twice"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of the second run."""
    parser.addoption("--second-try", action="store_true", help="run what the last run failed, if it may be")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tests of a second run, and watch what fails.

    Raises:
        UsageError: If what failed is not to be tried again.
    """
    # Set by xdist where tests are run; what fails is known where they are handed out.
    if hasattr(config, "workerinput"):
        return
    if config.getoption("second_try"):
        config.args = _tests_to_try_again(config.cache.get(_FAILED, {}) if config.cache else {})
    config.pluginmanager.register(_Tries(config))


def _tests_to_try_again(failed: dict[str, bool]) -> list[str]:
    if not failed:
        raise pytest.UsageError("--second-try: no test failed in the last run")
    others = [name for name, may_be_tried_again in failed.items() if not may_be_tried_again]
    if others:
        raise pytest.UsageError("these failed, and are tried once only:\n" + "\n".join(others))
    if len(failed) > MOST:
        listed = "\n".join(failed)
        raise pytest.UsageError(
            f"{len(failed)} tests failed, and at most {MOST} may need a second try:\n{listed}"
        )
    return list(failed)


class _Tries:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tried_twice = list(config.args) if config.getoption("second_try") else []
        self._failed: dict[str, bool] = {}
        self._passed: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # Under xdist the tests that could be collected run all the same.
        if report.failed:
            self._failed[report.nodeid] = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = any(mark in report.keywords for mark in MARKS)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # One that is skipped now has not passed.
        if session.exitstatus == pytest.ExitCode.OK and not self._passed.issuperset(self._tried_twice):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if getattr(self._config, "cache", None):
            self._config.cache.set(_FAILED, self._failed)
            self._config.cache.set(_TRIED_TWICE, self._tried_twice)

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        if self._tried_twice:
            terminalreporter.section(f"tried twice: {len(self._tried_twice)}, at most {MOST} may be")
        for name in self._tried_twice:
            is_passed = name in self._passed and name not in self._failed
            terminalreporter.line(f"{'passed' if is_passed else 'FAILED'} {name}")
