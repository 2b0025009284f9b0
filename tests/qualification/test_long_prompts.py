"""The command that reads very long prompts: its judgement, and in the lab itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshbench.lab.memory_watch import MemorySample, Role
from stages.slicing.model_facts import read_model_facts
from tests.qualification.long_prompts import (
    Findings,
    HangUp,
    StageMemory,
    coordinator_growth,
    gaps_ms,
    lines,
    made_up_tokens,
)
from tests.qualification.random_model import SHAPES, write_random_gguf
from tests.support.lab_fixtures import require_lab
from tests.support.requests import timed_answer

MIB = 2**20


def findings(
    *,
    process_mib: int = 90,
    growth_mib: int = 20,
    beside_ms: float = 30.0,
    chunks: tuple[int, ...] = (1, 0, 1),
) -> Findings:
    stages = tuple(
        StageMemory(host, layers, 100 * MIB, process_mib * MIB)
        for host, layers in (("host1", "[0, 1)"), ("host2", "[1, 2)"))
    )
    return Findings(
        stages, growth_mib * MIB, 50.0, (10.0,) * 20, (beside_ms,) * 20, HangUp(8192, chunks, 6.0)
    )


def missed(found: Findings) -> list[str]:
    return [line.title for line in lines(found, 32_768) if line.verdict == "missed"]


def test_all_is_well_within_the_bounds() -> None:
    assert missed(findings()) == []
    last = lines(findings(), 32_768)[-1]
    assert (last.title, last.measured) == ("tokens read per second", 655.36)


def test_each_bound_can_be_missed() -> None:
    assert missed(findings(process_mib=101)) == [
        "memory of host1's stage over what was foretold",
        "memory of host2's stage over what was foretold",
    ]
    assert missed(findings(growth_mib=65)) == ["growth of the coordinator, MiB"]
    assert missed(findings(beside_ms=41.0)) == ["a neighbour's time between tokens over alone"]
    assert missed(findings(chunks=(0, 2, 0))) == ["chunks that a stage computed after the client had left"]


def test_a_pace_of_few_tokens_is_none() -> None:
    found = findings()
    few = Findings(found.stages, 0, 50.0, found.alone_ms, (10.0,) * 3, found.hang_up)
    (pace,) = [line for line in lines(few, 32_768) if line.verdict == "not measured"]
    assert pace.note == "3 tokens while the prompt was read: too few"


def test_only_gaps_while_the_prompt_was_read_count() -> None:
    answer = timed_answer("abcd", 4, 100.0, 110.0, 130.0, 131.0)
    assert gaps_ms(answer, 130.0) == pytest.approx((10.0, 20.0))
    assert gaps_ms(answer, 1e9) == pytest.approx((10.0, 20.0, 1.0))
    assert gaps_ms(answer, 100.0) == ()


def sample(at_s: float, mib: int, role: Role = "coordinator") -> MemorySample:
    return MemorySample(0, at_s, 0, 1, role, mib * MIB, None)


def test_growth_is_what_the_prompt_added() -> None:
    samples = [
        sample(1.0, 100),
        sample(2.0, 101),
        sample(3.0, 130),
        sample(4.0, 110),
        sample(3.5, 900, "ray"),
    ]
    assert coordinator_growth(samples, 2.5) == 29 * MIB
    assert coordinator_growth(samples[:2], 2.5) == 0


def test_prompts_are_made_of_ordinary_tokens(tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write_random_gguf(path, SHAPES["tiny"], "Q8_0", n_ctx_train=10_000)
    facts = read_model_facts(path)
    assert facts.n_ctx_train == 10_000
    tokens = made_up_tokens(facts, 500, 1)
    assert len(tokens) == 500
    assert facts.n_vocab // 2 <= min(tokens) < max(tokens) < facts.n_vocab
    assert tokens == made_up_tokens(facts, 500, 1) != made_up_tokens(facts, 500, 2)


@pytest.mark.lab
@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_three_hosts_read_a_prompt_of_a_model_made_on_the_spot() -> None:
    require_lab()
    argv = [sys.executable, "-m", "tests.qualification.long_prompts", "--tokens", "8192", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=580)
    report = json.loads(done.stdout)
    assert report["conditions"]["prompt_tokens"] == 8192
    verdicts = {line["title"]: line["verdict"] for line in report["lines"]}
    for title in (
        *(f"memory of host{index}'s stage over what was foretold" for index in (1, 2, 3)),
        "growth of the coordinator, MiB",
        "chunks that a stage computed after the client had left",
    ):
        assert verdicts[title] == "met", report
