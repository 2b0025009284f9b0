"""What benches take, and what wrong options get."""

from pathlib import Path

import pytest

from mesh.cli.main import run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--delay-ms", "5,fast"], "'5,fast' is not a list of numbers"),
        (["--delay-ms", "-1"], "-1.0 is below 0.0"),
        (["--draft-max", "0,4"], "0 is below 1"),
        (["--draft-max", "2.5"], "'2.5' is not a list of numbers"),
        (["--proposers", "ngram,oracle"], "'oracle' is not a proposer; there are ngram, draft, auto, replay"),
        (["--preset", "acceptance"], "name their file with --spec-bench"),
        (["--quick", "--preset", "acceptance"], "leave out --preset"),
        (["--tokens", "1"], "--tokens"),
        (["--draft", "nowhere.gguf"], "nowhere.gguf"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], words: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "spec", str(smollm2_path), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bench", "arguments", "words"),
    [
        ("stress", ["--hang-ups", "1.5"], "1.5 is not in the range 0.0<=x<=1.0"),
        ("stress", ["--keys", "0"], "0 is not in the range 1<=x<=64"),
        ("stress", ["--keys", "2", "--preset", "acceptance"], "leave out --preset, --peer"),
        ("stress", ["--hang-ups", "0.3", "--soak", "1"], "leave out --preset, --peer"),
        ("stress", ["--keys", "2", "--duration-s", "9"], "as many requests as --requests says"),
        ("chaos", ["--hang-ups", "-0.1"], "-0.1 is not in the range 0.0<=x<=1.0"),
    ],
)
def test_wrong_hang_ups_are_named(
    bench: str, arguments: list[str], words: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", bench, str(smollm2_path), *arguments]) == 2
    # Lines break where the terminal ends.
    assert words in " ".join(capsys.readouterr().err.split())
