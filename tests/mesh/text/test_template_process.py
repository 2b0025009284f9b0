"""Chat templates that would hang or fill this process: they end their own, and the next one is answered."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from mesh.text import template_process
from mesh.text.chat_template import ChatTemplate
from mesh.text.template_process import Rendering, TemplateProcess
from spanmesh_proto.errors import InvalidRequest, Overloaded

HELLO = [{"role": "user", "content": "Hello"}]
NOW = datetime(2026, 11, 21, tzinfo=UTC)
GREETING = "{{ messages[0].content }}!"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

DOUBLING = (
    "{% set n = namespace(x='x') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    found = TemplateProcess(limit_s=0.5)
    yield found
    found.close()


def template(process: TemplateProcess, source: str) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>", now=lambda: NOW, process=process)


def pid_of(process: TemplateProcess) -> int:
    assert process._process is not None
    return process._process.pid


def ended() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.wait()
    return process


def test_a_process_that_ends_before_it_has_read_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TemplateProcess()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(template_process, "_start", lambda _limit_s: ended())
            with pytest.raises(InvalidRequest, match="ended its process"):
                template(process, GREETING).render(HELLO)
        assert template(process, GREETING).render(HELLO) == "Hello!"
    finally:
        process.close()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ENDLESS, "ran for more than 0.5 s"),
        ("{{ 3 ** (10 ** 9) }}", "ran for more than 0.5 s|MemoryError"),
        ("{{ 'x' * 10 ** 11 }}", "MemoryError"),
        ("{{ 'x'.ljust(10 ** 11) }}", "MemoryError|width|large"),
        ("{{ lipsum(n=10 ** 6) }}", "ran for more than 0.5 s|MemoryError"),
        (DOUBLING, "ran for more than 0.5 s|MemoryError"),
        ("{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "more than 16777216 characters|0.5 s"),
    ],
)
def test_a_template_that_would_never_end_ends_in_time(
    process: TemplateProcess, source: str, reason: str
) -> None:
    begin_s = time.monotonic()
    with pytest.raises(InvalidRequest, match=reason) as caught:
        template(process, source).render(HELLO)
    assert caught.value.param == "messages"
    # Half a second, and starting a process on a busy machine.
    assert time.monotonic() - begin_s < 30
    assert template(process, GREETING).render(HELLO) == "Hello!"


def test_a_process_that_is_gone_is_started_again(process: TemplateProcess) -> None:
    assert template(process, GREETING).render(HELLO) == "Hello!"
    before = pid_of(process)
    os.kill(before, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(before)] if psutil.pid_exists(before) else [], timeout=5)
    try:
        template(process, GREETING).render(HELLO)
    except InvalidRequest as error:
        # It was not gone yet when it was asked.
        assert "code -9" in error.message  # noqa: PT017
    assert template(process, GREETING).render(HELLO) == "Hello!"
    assert pid_of(process) != before


def test_it_has_no_environment_and_may_write_nothing(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_API_KEY", "sk-secret")
    process.close()
    assert template(process, GREETING).render(HELLO) == "Hello!"
    child = psutil.Process(pid_of(process))
    assert "MESH_API_KEY" not in child.environ()
    assert child.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert child.rlimit(psutil.RLIMIT_AS)[0] <= 2**30


def test_many_threads_share_it_and_none_waits_for_ever(process: TemplateProcess) -> None:
    outcomes: list[Any] = []

    def ask(source: str) -> None:
        try:
            outcomes.append(template(process, source).render(HELLO))
        except (InvalidRequest, Overloaded) as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=ask, args=(GREETING,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == ["Hello!"] * 10

    outcomes.clear()
    threads = [threading.Thread(target=ask, args=(ENDLESS,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == 6
    assert set(outcomes) <= {InvalidRequest, Overloaded}
    assert Overloaded in outcomes


def test_text_crosses_as_it_is(process: TemplateProcess) -> None:
    content = "line\nline\r\n\x00 \ud800 \U0001f680 \u2028 'quoted' \"twice\" {{ x }}"
    assert template(process, GREETING).render([{"role": "user", "content": content}]) == content + "!"
    long = "x" * 3_000_000
    assert template(process, GREETING).render([{"role": "user", "content": long}]) == long + "!"


def test_one_that_never_works_is_told_at_the_start(process: TemplateProcess) -> None:
    with capture_logs() as events:
        template(process, GREETING).try_out()
        template(process, ENDLESS).try_out()
    assert [event["event"] for event in events] == ["chat_template_ended_its_process", "chat_template_fails"]


def test_what_was_asked_is_all_that_crosses(process: TemplateProcess) -> None:
    asked = Rendering(
        "{{ now }}{{ source }}{{ strftime_now('%Y') }}", "<s>", "</s>", {}, NOW.isoformat(), 100
    )
    assert process.render(asked) == "2026"
