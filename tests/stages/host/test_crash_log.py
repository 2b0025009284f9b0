"""Which line of a crashed process's standard error is shown."""

import os
import subprocess
import sys
from pathlib import Path

from stages.host.crash_log import crash_line

ABORTED = """:actor_name:StageActor
ggml/src/ggml-cpu/ops.cpp:12: GGML_ASSERT(n > 0) failed
*** SIGABRT received at time=1 on cpu 1 ***
PC: @     0x7f5fb7774219  (unknown)  (unknown)
Fatal Python error: Aborted

Stack (most recent call first):
"""
READER = """
from stages.host.crash_log import CrashLogReader
print(CrashLogReader().crash_message({pid}))
"""


def test_what_llama_cpp_says_comes_before_what_python_says() -> None:
    assert crash_line(ABORTED) == "ggml/src/ggml-cpu/ops.cpp:12: GGML_ASSERT(n > 0) failed"
    assert crash_line(ABORTED.replace("GGML_ASSERT", "")) == "Fatal Python error: Aborted"


def test_a_process_that_was_killed_says_nothing() -> None:
    assert crash_line(":actor_name:StageActor\n") is None


def test_a_line_is_not_longer_than_a_person_reads() -> None:
    assert len(crash_line("GGML_ASSERT(" + "x" * 10_000) or "") == 200


def test_the_words_lie_beside_those_of_whoever_reads_them(tmp_path: Path) -> None:
    (tmp_path / "worker-ab-01-77.err").write_text(ABORTED)

    def ask(pid: int) -> str:
        with (tmp_path / "worker-ab-01-78.err").open("w") as errors:
            done = subprocess.run(
                [sys.executable, "-c", READER.format(pid=pid)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                check=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
            )
        return done.stdout.strip()

    assert ask(77).endswith("GGML_ASSERT(n > 0) failed")
    assert ask(99) == "None"
