"""Documents of a served mesh: OpenAPI, keys of /mesh/status, metrics, and recorded exchanges.

Only the command line and HTTP are used, so that no change inside can spoil the comparison.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from mesh.serve.options import demo_model
from meshbench.lab.local_mesh import served_mesh
from tests.contracts.exchanges import EXCHANGES, KEY, Exchange
from tests.contracts.normal_form import answer_in_normal_form, shape_of
from tests.support.tiny_embedders import TinyEmbedder

# Something is proposed in every answer, whether it pays or not: otherwise speed decides which figures appear.
_SPECULATION = ("--speculate", "ngram", "--set", "spec-width=4", "--set", "spec-depth=2")
_OPTIONS = ("--stages", "2", "--exact", "--ctx-size", "512", "--threads", "1", *_SPECULATION)


@contextmanager
def client_of_a_mesh(folder: Path) -> Iterator[httpx.Client]:
    """A client of `mesh serve` with SmolLM2 in two stages, in exact mode, and a tiny embedding model."""
    key = {"Authorization": f"Bearer {KEY}"}
    with (
        served_mesh(demo_model(), folder, KEY, _OPTIONS) as mesh,
        httpx.Client(base_url=f"http://127.0.0.1:{mesh.port}", headers=key, timeout=120) as http,
    ):
        embedder = TinyEmbedder().write(folder / "tiny-embedder.gguf")
        http.post("/mesh/load", json={"model": str(embedder), "embeddings": True}).raise_for_status()
        yield http


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
    """By name the kind and the labels of each metric."""
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


def status(http: httpx.Client) -> Any:
    """Keys and types."""
    return shape_of(http.get("/mesh/status").raise_for_status().json())


SERVED: Mapping[str, Callable[[httpx.Client], Any]] = {
    "exchanges": exchanges_with,  # first: the others tell what they left
    "openapi": openapi,
    "status": status,
    "metrics": metrics,
}
