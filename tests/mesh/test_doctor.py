"""What a doctor makes of what was found."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from mesh import doctor
from mesh.cluster.certificates import make_certificate
from mesh.cluster.join_token import JoinToken, encode
from mesh.cluster.port_plan import own_part
from mesh.doctor import (
    Outcome,
    agreement_checks,
    exit_code,
    format_checks,
    host_checks,
    mesh_checks,
    this_host_checks,
    token_checks,
)
from mesh.status import MeshStatus, ModelDescription, StageStatus
from mesh.text.answer_format import AnswerFormat
from spanmesh_proto.addresses import PortRange
from stages.host.host_report import report_host
from stages.layers import LayerRange
from stages.runtime.llama_libraries import gpu_backends
from stages.weights.virtual_stages import StageCache
from tests.qualification.fuzz.altered_models import text_value, write_vocabulary
from tests.support.port_ranges import free_range
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30
LOOK: dict[str, Any] = {
    "versions": {
        "spanmesh": "0.1.0",
        "protocol": "5",
        "python": "3.11.7",
        "llama_cpp": "0.3.36",
        "ray": "2.60.0",
        "attention": "spanmesh 1, 512 bits",
    },
    "platform": "Linux x86_64",
    "devices": [
        {
            "name": "CPU",
            "description": "A processor",
            "kind": "cpu",
            "free_bytes": GIB,
            "total_bytes": 8 * GIB,
        }
    ],
    "backends": [],
    "cards": [],
    "builds_beside": {},
    "free_memory_bytes": 8 * GIB,
    "free_disk_bytes": 50 * GIB,
    "cache_dir": "/var/cache",
    "can_stay_awake": True,
    "has_latency_device": True,
    "num_processors": 8,
    "processor_quota": None,
    "files": {"ab" * 32: True},
    "unix_s": 1.8e9,
}
STATUS = MeshStatus(
    model=ModelDescription(name="m"), ready=True, phase="serving", stages=(StageStatus(), StageStatus())
)
LINK: dict[str, Any] = {
    "from": "a",
    "to": "b",
    "failure": None,
    "rtt_ms": {"p50": 1.0, "p99": 2.0},
    "bytes_per_s": 1e8,
}
LINKS: dict[str, Any] = {"head": "a", "links": [LINK], "round": None, "wires": []}


def found(host: str, **changes: Any) -> dict[str, Any]:
    clock = {"clock_ahead_ms": changes.pop("ahead_ms", 1.0), "clock_within_ms": 3.0}
    return {"host": host, "look": LOOK | changes, "failure": None, **clock}


def bad(checks: Any) -> dict[tuple[str, str], Outcome]:
    return {(each.where, each.what): each.outcome for each in checks if each.outcome is not Outcome.OK}


def test_a_sound_mesh_has_nothing_to_do() -> None:
    checks = list(mesh_checks(STATUS, LINKS, [found("a"), found("b")]))
    assert bad(checks) == {}
    assert exit_code(checks) == 0
    assert any(check.detail == "round trip 1.00 ms (p99 2.00), 100 MB/s" for check in checks)


@pytest.mark.parametrize(
    ("changes", "what", "outcome"),
    [
        ({"free_memory_bytes": GIB // 2}, "memory", Outcome.WARN),
        ({"free_disk_bytes": GIB}, "disk at /var/cache", Outcome.WARN),
        ({"can_stay_awake": False}, "processors", Outcome.WARN),
        ({"can_stay_awake": False, "has_latency_device": False}, "processors", Outcome.WARN),
        ({"processor_quota": 0.5}, "quota", Outcome.WARN),
        ({"devices": []}, "device", Outcome.FAIL),
        ({"files": {"ab" * 32: False}}, "stage file abababababab", Outcome.FAIL),
        ({"files": {"ab" * 32: None}}, "stage file abababababab", Outcome.WARN),
    ],
)
def test_what_is_wrong_with_a_host_is_said_with_a_remedy(
    changes: dict[str, Any], what: str, outcome: Outcome
) -> None:
    checks = list(host_checks("a", LOOK | changes))
    assert bad(checks) == {("a", what): outcome}
    assert all(check.fix for check in checks if check.outcome is not Outcome.OK)


def test_a_quota_of_processor_time_is_named() -> None:
    checks = {check.what: check for check in host_checks("a", LOOK | {"processor_quota": 2.5})}
    assert checks["quota"].outcome is Outcome.OK
    assert "2.5 of 8 processors" in checks["quota"].detail
    assert "quota" not in {check.what for check in host_checks("a", LOOK)}


def test_what_only_linux_does_is_no_fault_elsewhere() -> None:
    mac = {"platform": "Darwin arm64", "can_stay_awake": False, "has_latency_device": False}
    checks = {check.what: check for check in host_checks("a", LOOK | mac)}
    assert checks["processors"].outcome is Outcome.OK
    assert "only Linux" in checks["processors"].detail


CARD: dict[str, Any] = {
    "name": "CUDA0",
    "description": "RTX ",
    "kind": "gpu",
    "free_bytes": 7 * GIB,
    "total_bytes": 8 * GIB,
}


@pytest.mark.parametrize(
    ("changes", "says", "fix"),
    [
        ({"cards": ["NVIDIA"]}, "none for the GPU of NVIDIA", "BACKEND=cuda or BACKEND=vulkan"),
        ({"cards": ["AMD"]}, "none for the GPU of AMD", "make environment BACKEND=vulkan,"),
        # The wrong backend is as good as none.
        ({"cards": ["AMD"], "backends": ["cuda"]}, "none for the GPU of AMD", "BACKEND=vulkan,"),
        (
            {"cards": ["AMD", "NVIDIA"], "builds_beside": {"cuda": "/env/backends/cuda"}},
            "none for the GPU of AMD and NVIDIA",
            "export LLAMA_CPP_LIB_PATH=/env/backends/cuda",
        ),
        ({"cards": ["NVIDIA"], "backends": ["cuda"]}, "cuda finds no device", "install NVIDIA's driver"),
        ({"cards": ["Intel"], "backends": ["vulkan"]}, "vulkan finds no device", "mesa-vulkan-drivers"),
    ],
)
def test_a_gpu_that_llama_cpp_cannot_use_is_noticed(changes: dict[str, Any], says: str, fix: str) -> None:
    checks = {check.what: check for check in host_checks("a", LOOK | changes)}
    assert checks["device"].outcome is Outcome.WARN
    assert says in checks["device"].detail
    assert fix in checks["device"].fix


def test_gpus_are_shown_with_their_memory_and_backends() -> None:
    report = LOOK | {"cards": ["NVIDIA"], "backends": ["cuda"], "devices": [*LOOK["devices"], CARD]}
    checks = {check.what: check for check in host_checks("a", report)}
    assert checks["device"].outcome is Outcome.OK
    assert checks["device"].detail == (
        "llama.cpp computes on CPU (A processor), CUDA0 (RTX, 7.0 GiB of 8.0 GiB free);"
        " its backends: cpu, cuda"
    )


@pytest.mark.parametrize(
    ("name", "version", "outcome"),
    [
        ("spanmesh", "0.2.0", {("b", "spanmesh"): Outcome.FAIL}),
        ("ray", "2.61.0", {("b", "ray"): Outcome.FAIL}),
        ("python", "3.12.1", {("b", "python"): Outcome.FAIL}),
        ("python", "3.11.9", {}),
        ("llama_cpp", "0.3.37", {("b", "llama.cpp"): Outcome.WARN}),
        ("attention", "ggml", {("b", "attention"): Outcome.WARN}),
    ],
)
def test_hosts_must_agree(name: str, version: str, outcome: dict[tuple[str, str], Outcome]) -> None:
    versions: dict[str, str] = LOOK["versions"]
    assert bad(agreement_checks("b", versions | {name: version}, versions)) == outcome


@pytest.mark.parametrize(
    ("ahead_ms", "outcome"),
    [(-2_500.0, Outcome.WARN), (61_000.0, Outcome.WARN), (-864_061_000.0, Outcome.FAIL), (1_999.0, None)],
)
def test_clocks_apart(ahead_ms: float, outcome: Outcome | None) -> None:
    checks = bad(mesh_checks(STATUS, LINKS, [found("a"), found("b", ahead_ms=ahead_ms)]))
    assert checks == ({} if outcome is None else {("b", "clock"): outcome})


def test_a_broken_link_a_silent_host_and_a_lost_stage_fail() -> None:
    broken = LINKS | {"links": [LINK | {"failure": "10.0.0.2:5000 does not answer in time"}]}
    silent = {"host": "b", "look": None, "failure": "b did not finish within 600 s"}
    lost = replace(STATUS, ready=False, lost="stage 1 is gone")
    checks = list(mesh_checks(lost, broken, [found("a"), silent]))
    assert bad(checks) == {
        ("mesh", "serving"): Outcome.FAIL,
        ("b", "examination"): Outcome.FAIL,
        ("a to b", "link"): Outcome.FAIL,
    }
    assert exit_code(checks) == 1
    (link,) = [check for check in checks if check.what == "link"]
    assert "firewall" in link.fix


def test_a_range_is_tried_from_every_other_host() -> None:
    ports = {"ports": "20000-20099", "closed_ports": [20_000, 20_043]}
    tried = LINKS | {"links": [LINK | ports, LINK | {"from": "c"} | ports | {"closed_ports": []}]}
    checks = list(mesh_checks(STATUS, tried, [found("a"), found("b")]))
    assert bad(checks) == {("a to b", "ports"): Outcome.FAIL}
    closed, is_open = (check for check in checks if check.what == "ports")
    assert closed.detail == "TCP to 20000, 20043 of --port-range 20000-20099 does not arrive"
    assert "let TCP to 20000-20099 from a through the firewall of b" in closed.fix
    assert is_open.where == "c to b"


def test_a_range_is_checked_where_it_is_to_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing = tmp_path / "outgoing"
    outgoing.write_text("32768\t60999\n")
    monkeypatch.setattr(doctor, "_OUTGOING_PORTS", outgoing)
    port_range = free_range()
    (is_free,) = doctor._range("me", port_range, is_in_use=False)
    assert is_free.outcome is Outcome.OK
    with contextlib.ExitStack() as stack:
        for port in own_part(port_range):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        (taken,) = doctor._range("me", port_range, is_in_use=False)
        assert taken.outcome is Outcome.FAIL
        assert f"other processes listen on {own_part(port_range)[0]}-{port_range.last}" in taken.detail
        # They may be the mesh that is looked at.
        assert list(doctor._range("me", port_range, is_in_use=True)) == []
    (lent,) = doctor._range("me", PortRange(60_990, 61_089), is_in_use=True)
    assert (lent.outcome, lent.fix) == (Outcome.WARN, "give a --port-range below 32768")
    outgoing.unlink()
    assert list(doctor._range("me", PortRange(60_990, 61_089), is_in_use=True)) == []


def test_what_is_not_written_for_a_next_head_fails() -> None:
    checks = list(
        mesh_checks(replace(STATUS, state_not_written="No space left on device"), LINKS, [found("a")])
    )
    assert bad(checks) == {("mesh", "takeover"): Outcome.FAIL}
    (check,) = [check for check in checks if check.what == "takeover"]
    assert "No space left on device" in check.detail
    assert bad(mesh_checks(STATUS, LINKS, [found("a")])) == {}


def test_slow_ways_are_to_think_about() -> None:
    wire = {"from": "a", "to": "b", "proposed": "f16", "row_transfer_ms": 9.0, "row_compute_ms": 2.0}
    turn = {"order": ["a", "b"], "best": ["b", "a"], "order_ms": 40.0, "best_ms": 20.0}
    checks = bad(mesh_checks(STATUS, LINKS | {"wires": [wire], "round": turn}, [found("a")]))
    assert checks == {("mesh", "order of stages"): Outcome.WARN, ("a to b", "bandwidth"): Outcome.WARN}


def test_a_host_looks_at_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = TinyModel("llama").write(tmp_path / "model.gguf")
    right, wrong = (StageCache().cut(model, layers) for layers in (LayerRange(0, 3), LayerRange(3, 6)))
    data = bytearray(wrong.path.read_bytes())
    data[-100] ^= 1
    wrong.path.write_bytes(data)
    seen = report_host([wrong.sha256, right.sha256, "1" * 64])
    assert seen.files == {wrong.sha256: False, right.sha256: True, "1" * 64: None}
    assert "CPU" in [device.name for device in seen.devices]
    assert seen.backends == (gpu_backends() or ())
    assert seen.free_disk_bytes > 0


def test_a_path_that_depends_on_the_working_directory_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/opt/mine")
    assert list(doctor._python_path("here")) == []
    monkeypatch.setenv("PYTHONPATH", ":/opt/mine")
    (check,) = doctor._python_path("here")
    assert (check.outcome, check.what) == (Outcome.WARN, "PYTHONPATH")
    assert "('')" in check.detail


def test_this_host_names_a_port_that_is_taken_and_an_address_that_is_not_its_own(
    smollm2_path: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        checks = {
            check.what: check
            for check in this_host_checks("me", port=port, advertise="192.0.2.77", model=smollm2_path)
        }
        url = f"http://127.0.0.1:{port}"
        ours = {
            check.what: check
            for check in this_host_checks("me", port=port, advertise="127.0.0.1", model=None, url=url)
        }
    assert checks[f"port {port}"].outcome is Outcome.WARN
    assert ours[f"port {port}"].outcome is Outcome.OK, "it is that of the mesh that is looked at"
    assert checks["address"].outcome is Outcome.FAIL
    assert "llama, 30 layers, 29 places to cut at; sha256 " in checks[f"model {smollm2_path.name}"].detail
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2_path.read_bytes()[:5000])
    checks = {check.what: check for check in this_host_checks("me", port=1, advertise=None, model=broken)}
    assert checks["model broken.gguf"].outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("age_s", "says"), [(-3600, "the join token expired"), (3600, "cannot reach the head at 127.0.0.1:1")]
)
def test_a_token_whose_head_is_not_there_fails(age_s: int, says: str) -> None:
    now = dt.datetime.now(dt.UTC)
    fingerprint = make_certificate(now).fingerprint
    token = encode(JoinToken(("127.0.0.1:1",), "secret", fingerprint, int(now.timestamp()) + age_s))
    (check,) = token_checks("me", token)
    assert check.outcome is Outcome.FAIL
    assert says in check.detail


def test_how_models_call_and_reason_is_told() -> None:
    told = {"is_found": True, "call": "<tool_call>\nNAME{…}", "reasoning": ["<think>…</think>"]}
    models = [
        {"id": "a", "answer_format": told},
        {"id": "b", "answer_format": AnswerFormat().shown()},
        {"id": "embeddings"},
    ]
    found = {check.what: check for check in format_checks({"data": models})}
    assert {check.outcome for check in found.values()} == {Outcome.OK}
    details = {what: check.detail for what, check in found.items()}
    assert details["calls of a"] == 'written as "<tool_call>\\nNAME{…}"'
    assert details["reasoning of a"] == 'written as "<think>…</think>"'
    for what in ("calls of b", "reasoning of b"):
        assert details.pop(what).startswith("nothing certain is found in the chat template: ")
    assert len(details) == 2


def test_of_a_file_it_is_told_how_its_model_calls_and_reasons(tmp_path: Path) -> None:
    plain = TinyModel("llama", n_layers=1).write(tmp_path / "plain.gguf")
    template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
        "{% for call in m.tool_calls %}<call>{{ call.function | tojson }}</call>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}{# tools #}"
    )
    own = tmp_path / "own.gguf"
    write_vocabulary(plain, own, {"tokenizer.chat_template": text_value(template)})
    details = {check.what: check.detail for path in (own, plain) for check in doctor._texts("me", path)}
    assert details["calls of own.gguf"].startswith('written as "<call>{')
    assert details["reasoning of own.gguf"] == 'written as "<think>…</think>"'
    assert "nothing certain" in details["calls of plain.gguf"]
    assert "nothing certain" in details["reasoning of plain.gguf"]
