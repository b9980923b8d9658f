# SPDX-License-Identifier: GPL-2.0
"""``kz top``: what it shows of a daemon, and what it runs in a guest."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lab.boot import top
from lab.core import errors
from lab.core.paths import REPO
from tests import devices

STATUS: dict[str, Any] = {
    "ok": True,
    "working": True,
    "problems": [],
    "features": ["stats", "free-page-reporting"],
    "target": 0,
    "actual": 1 << 20,
    "inflated": 1 << 20,
    "reported": 1 << 30,
    "discarded": 1 << 29,
    "proven_zero": 1 << 28,
    "skipped": {"too_small": 4096, "suspended": 0},
    "unproven": {"private": 8192},
}
MORE = {**STATUS, "reported": 3 << 30}


def kz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lab", "top", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_daemons_figures_and_their_rates() -> None:
    now, before = top.Look(12.0, MORE), top.Look(10.0, STATUS)
    text = top.view(now, before)
    assert text.startswith("Yes: memory goes back to the host.\n")
    assert "1.00 GiB/s" in text
    assert "too_small" in text
    assert "suspended" not in text
    assert "private" in text
    assert "/s" not in top.view(now, None)


def test_an_idle_daemon_shows_the_reason() -> None:
    idle = {**STATUS, "working": False, "problems": ["no front end is connected"]}
    assert top.view(top.Look(1.0, idle), None).startswith("No: no front end is connected\n")
    part = {**STATUS, "problems": ["hidden"]}
    assert top.view(top.Look(1.0, part), None).startswith(
        "Yes: memory goes back to the host; but hidden\n"
    )


def test_a_daemon_that_began_anew_has_no_negative_rates() -> None:
    assert top.rates(top.Look(2.0, STATUS), top.Look(1.0, MORE)) == dict.fromkeys(top.COUNTED, 0.0)


@pytest.mark.parametrize("answer", [b"", b"what?\n", b"[]\n", b'{"ok": false, "error": "no"}\n'])
def test_another_socket_is_not_taken_for_a_daemon(tmp_path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(errors.LabError) as caught:
            top.ask(tmp_path / "s")
        thread.join()
    assert caught.value.code == errors.MACHINE


def test_no_socket_there() -> None:
    done = kz("--once", "--socket", "/nonexistent")
    assert done.returncode == errors.MACHINE
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()] == ["kz", "why", "fix"]


def test_json_has_the_answer_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([top.Look(10.0, STATUS), top.Look(12.0, MORE)])
    monkeypatch.setattr(top, "ask", lambda path: next(looks))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    out = io.StringIO()
    with pytest.raises(StopIteration):
        top.watch(Path("x"), interval=1, once=False, as_json=True, out=out)
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first == {**STATUS, "per_second": None}
    assert second["per_second"]["reported"] == 1 << 30


@pytest.mark.slow
def test_a_real_daemon() -> None:
    with devices.running() as device:
        done = kz("--once", "--socket", str(device.control))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("No: no front end is connected")


@pytest.mark.boots
def test_one_look_when_the_command_is_done() -> None:
    flush = "echo 0 > /sys/kernel/mm/page_reporting/flush"
    done = kz(
        "--kernel",
        "debug",
        "--memory",
        "1G",
        "--once",
        "--json",
        "--",
        "sh",
        "-c",
        f"echo hello; {flush}; alloc_once --size 64 --pages thp",
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["state"] == "working"
    assert told["skip_pages"] >= 64 << 8
    assert "hello" in done.stderr


@pytest.mark.boots
def test_a_command_that_fails_is_a_failure() -> None:
    done = kz("--kernel", "debug", "--memory", "1G", "--once", "--", "false")
    assert done.returncode == errors.FAILED
    assert done.stdout == ""


@pytest.mark.boots
def test_on_a_terminal_it_goes_on_until_ctrl_c() -> None:
    ours, theirs = pty.openpty()
    argv = [
        sys.executable,
        "-m",
        "lab",
        "top",
        "--kernel",
        "debug",
        "--memory",
        "1G",
        "--interval",
        "1",
    ]
    with subprocess.Popen(
        argv,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        seen, deadline = b"", time.monotonic() + 120
        try:
            # The first screen has no rates, the third has.
            while seen.count(b"known zero") < 8 and time.monotonic() < deadline:
                seen += os.read(ours, 4096)
            os.write(ours, b"\x03")
            while True:
                try:
                    if not os.read(ours, 4096):
                        break
                except OSError:
                    break
            code = process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        os.close(ours)
        assert process.stderr is not None
        assert code == 0, process.stderr.read().decode()
    assert b"\x1b[H" in seen
    assert b"/s" in seen


@pytest.mark.boots
def test_into_a_pipe_it_goes_on_until_it_is_interrupted() -> None:
    argv = [
        sys.executable,
        "-m",
        "lab",
        "top",
        "--kernel",
        "debug",
        "--memory",
        "1G",
        "--interval",
        "1",
    ]
    with subprocess.Popen(
        [*argv, "--json", "--", "sleep", "1000"],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            first, second = (json.loads(process.stdout.readline()) for _ in range(2))
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert code == 0
        assert process.stderr.read() == ""
    assert first["interval_s"] is None
    assert second["interval_s"] > 0.9
    assert first["sources"]["reported"]["set_pages_per_s"] is None
    assert second["sources"]["reported"]["set_pages_per_s"] >= 0
