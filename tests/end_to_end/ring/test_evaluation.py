"""lm-eval, unmodified, scores questions over a mesh of two stages.

`SPANMESH_LM_EVAL` names the command `lm-eval` of an environment of its own, made by `pip install
'lm-eval[api]'`.
"""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support import mesh_in_process
from tests.support.api_harness import KEY

COMMAND = os.environ.get("SPANMESH_LM_EVAL")
ROOT = Path(__file__).parents[3]
EVALUATION = ROOT / "examples" / "evaluation"

pytestmark = [
    pytest.mark.model,
    pytest.mark.sweep,
    pytest.mark.skipif(COMMAND is None, reason="no lm-eval: see SPANMESH_LM_EVAL"),
]

mesh_url = mesh_in_process.mesh_url


def likeliest(mesh_url: str, country: str, choices: list[str]) -> int:
    """The choice with the largest sum of logprobs, by the API alone."""
    text = f"The capital of {country} is"
    sums = []
    for choice in choices:
        fields = {"prompt": f"{text} {choice}", "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = httpx.post(f"{mesh_url}/v1/completions", json=fields, headers={"x-api-key": KEY}, timeout=60)
        scored = answer.json()["choices"][0]["logprobs"]
        pairs = zip(scored["text_offset"], scored["token_logprobs"], strict=True)
        sums.append(sum(logprob for offset, logprob in pairs if offset >= len(text)))
    return sums.index(max(sums))


def test_questions_are_scored(mesh_url: str, tmp_path: Path) -> None:
    assert COMMAND is not None
    url = f"{mesh_url}/v1/completions"
    argv = [
        COMMAND,
        "run",
        "--model",
        "local-completions",
        "--tasks",
        "capitals",
        "--include_path",
        str(EVALUATION),
    ]
    # Two requests at once, each of several prompts.
    argv += ["--model_args", f"model=default,base_url={url},num_concurrent=2,auth_token={KEY}"]
    argv += ["--batch_size", "3", "--log_samples", "--output_path", str(tmp_path)]
    environment = {
        **os.environ,
        "OPENAI_API_KEY": KEY,
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [samples] = tmp_path.glob("**/samples_capitals_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    docs = [json.loads(line) for line in (EVALUATION / "capitals.jsonl").read_text().splitlines()]
    assert len(found) == len(docs)
    expected = [likeliest(mesh_url, doc["country"], doc["choices"]) == doc["answer"] for doc in docs]
    assert [bool(sample["acc"]) for sample in sorted(found, key=lambda each: each["doc_id"])] == expected
    assert any(expected)
