"""Documents of a served mesh: OpenAPI, keys of /mesh/status, metrics, and recorded exchanges.

Only the command line and HTTP are used, so that no change inside can spoil the comparison.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.contracts.exchanges import EXCHANGES, KEY, Exchange
from tests.contracts.normal_form import answer_in_normal_form, shape_of
from tests.support.tiny_embedders import TinyEmbedder

SERVED = ("openapi", "status", "metrics", "exchanges")
_START_S = 90.0


def answers_of_a_mesh() -> dict[str, Any]:
    """All documents of a mesh of two stages in exact mode, started for them."""
    with tempfile.TemporaryDirectory() as folder, served_mesh(Path(folder)) as http:
        exchanges = exchanges_with(http)
        return {
            "openapi": openapi(http),
            "status": shape_of(http.get("/mesh/status").raise_for_status().json()),
            "metrics": metrics(http),
            "exchanges": exchanges,
        }


@contextmanager
def served_mesh(folder: Path) -> Iterator[httpx.Client]:
    """A client of `mesh serve` with SmolLM2 and a tiny embedding model."""
    keys, out, err = folder / "keys", folder / "out", folder / "err"
    keys.write_text(f"tester {KEY}\n")
    command = [
        *(str(Path(sys.executable).with_name("mesh")), "serve", "--port", "0", "--advertise", "127.0.0.1"),
        *("--stages", "2", "--exact", "--ctx-size", "512", "--threads", "1", "--api-key-file", str(keys)),
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
    with out.open("w") as stdout, err.open("w") as stderr:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment
        )
    try:
        deadline_s = time.monotonic() + _START_S
        while (served := re.search(r"served at (http://\S+)/v1", out.read_text())) is None:
            assert server.poll() is None, err.read_text()
            assert time.monotonic() < deadline_s, err.read_text()
            time.sleep(0.1)
        key = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=served[1], headers=key, timeout=120) as http:
            embedder = TinyEmbedder().write(folder / "tiny-embedder.gguf")
            loading = {"model": str(embedder), "embeddings": True}
            http.post("/mesh/load", json=loading).raise_for_status()
            yield http
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(120)


def exchanges_with(http: httpx.Client) -> dict[str, Any]:
    """Answers of all exchanges, in their order, since some name an earlier answer's id."""
    answers: dict[str, Any] = {}
    stored = ""
    for exchange in EXCHANGES:
        response = _asked(http, exchange, stored)
        stored = _id_of(response) or stored
        answers[exchange.name] = answer_in_normal_form(response)
    return answers


def _asked(http: httpx.Client, exchange: Exchange, stored: str) -> httpx.Response:
    content = None
    if exchange.body is not None:
        text = exchange.body if isinstance(exchange.body, str) else json.dumps(exchange.body)
        content = text.replace("STORED", stored)
    path = exchange.path.replace("STORED", stored)
    kind = {} if content is None else {"Content-Type": "application/json"}
    return http.request(exchange.method, path, content=content, headers={**kind, **exchange.headers})


def _id_of(response: httpx.Response) -> str:
    found = re.search(r'"id": ?"(resp_[0-9a-zA-Z]+)"', response.text)
    return found[1] if found else ""


def openapi(http: httpx.Client) -> Any:
    """The document without the version of this program."""
    document = http.get("/openapi.json").raise_for_status().json()
    document["info"].pop("version")
    return document


def metrics(http: httpx.Client) -> dict[str, Any]:
    """By name the kind, help and labels of each metric."""
    found: dict[str, Any] = {}
    text = http.get("/metrics").raise_for_status().text
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        labels = {
            label
            for labelled in re.findall(rf"^{name}(?:_total|_bucket)?\{{(.*)\}} ", text, re.MULTILINE)
            for label in re.findall(r'(\w+)="', labelled)
        }
        found[name] = {"kind": kind, "labels": sorted(labels)}
    return found
