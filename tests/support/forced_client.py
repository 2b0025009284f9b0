"""Greedy tokens of a mesh, and what it would say after each token of another answer, with log probabilities.

Run as a program on a host of a lab: a job on standard input, one entry for each token on standard output.
"""

import json
import sys
import urllib.request
from typing import Any

_NUM_TOP = 20


def ask(url: str, prompt: list[int], max_tokens: int) -> list[dict[str, Any]]:
    """Greedy tokens, each with its id and the log probabilities of the likeliest texts."""
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": _NUM_TOP,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        (choice,) = json.load(answer)["choices"]
    tops = choice["logprobs"]["top_logprobs"]
    return [{"id": token, "top": top} for token, top in zip(choice["token_ids"], tops, strict=True)]


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    url, prompt, forced = job["url"], job["prompt"], job.get("tokens")
    if forced is None:
        found = ask(url, prompt, job["max_tokens"])
    else:
        found = [ask(url, prompt + forced[:index], 1)[0] for index in range(len(forced))]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
