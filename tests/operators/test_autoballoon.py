# SPDX-License-Identifier: GPL-2.0
"""autoballoon: its targets, and guests that lie, hang or end, beside one that does not."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.bench.session import LOOP, Side
from lab.boot import balloon
from lab.boot.guest import running
from lab.boot.spec import BootSpec
from lab.core.paths import REPO
from tools.autoballoon import autoballoon
from tools.autoballoon.autoballoon import MIB, UNSET, decide

FOLDER = REPO / "tools" / "autoballoon"
GIB = 1024 * MIB
USUAL = argparse.Namespace(free=20, margin=128, step=128, interval=1, once=True, dry_run=False)


def stats(total: int, free: int, available: int | None = None) -> dict[str, Any]:
    """Statistics, given in MiB."""
    values = {"total_memory": total, "free_memory": free, "available_memory": available or free}
    return {name: value * MIB for name, value in values.items()}


@pytest.mark.parametrize(
    ("size", "figures", "in_total", "wanted"),
    [
        (1024, (1000, 800), False, 896),  # at most a step is taken
        (700, (676, 200, 300), False, 619),  # 476 MiB used are 80 % of 595
        (700, (676, 150), False, None),  # 22 %: near enough
        (
            700,
            (676, 105, 90),
            False,
            738,
        ),  # near enough, but less than the working set and its margin
        (700, (676, 10), False, 857),  # given at once
        (700, (676, 200), False, 628),  # the working set and its margin need more than 595 MiB
        (300, (276, 135), False, None),  # 7 MiB more than they need
        (1000, (976, 0), False, 1024),  # never more than all
        (700, (1000, 200, 300), True, 619),  # the total has the 324 MiB of the balloon
        (700, (676, 120, 500), False, None),  # cache is not free
    ],
)
def test_the_target(
    size: int, figures: tuple[int, ...], in_total: bool, wanted: int | None
) -> None:
    found, _ = decide((GIB, size * MIB, stats(*figures), in_total), USUAL)
    assert found == (wanted and wanted * MIB)


@given(st.data())
def test_no_target_is_below_the_working_set(data: st.DataObject) -> None:
    size = data.draw(st.integers(64 * MIB, GIB))
    total = data.draw(st.integers(32 * MIB, size))
    free, available = (data.draw(st.integers(0, total)) for _ in range(2))
    given_stats = {"total_memory": total, "free_memory": free, "available_memory": available}
    wanted, _ = decide((GIB, size, given_stats, False), USUAL)
    if wanted is not None:
        assert wanted >= min(GIB, size - available + USUAL.margin * MIB)
        assert size - USUAL.step * MIB <= wanted <= GIB


LIES: dict[str, dict[str, Any]] = {
    "free above total": stats(900, 901),
    "available above total": stats(900, 800, 901),
    "more than the machine": stats(1025, 800),
    "no memory": stats(0, 0),
    "negative": stats(900, -1),
    "huge": {"total_memory": 10**4000, "free_memory": 1},
    "nothing": {},
    "unset": {"total_memory": UNSET, "free_memory": UNSET},
}


class Qemu:
    """A made-up QEMU with 1 GiB at a QMP socket, whose guest sends ``sent`` and follows its
    targets.
    """

    def __init__(
        self, path: Path, sent: dict[str, Any], answers: Callable[[str], bytes | None]
    ) -> None:
        self.path, self.sent, self.answers = path, sent, answers
        self.size, self.updates, self.targets, self.hangs = GIB, 0, list[int](), False
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            connection.sendall(self.answers("greeting") or b'{"QMP": {}}\n{"event": "RESUME"}\n')
            for line in lines:
                request = json.loads(line)
                made = self.answers(request["execute"])
                connection.sendall(
                    json.dumps({"return": self.answer(request)}).encode() + b"\n"
                    if made is None
                    else made
                )

    def answer(self, request: dict[str, Any]) -> Any:
        arguments = request["arguments"]
        match request["execute"], arguments.get("property"):
            case "qom-list", _:
                return [{"name": "balloon", "type": "child<virtio-balloon-pci>"}]
            case "query-memory-size-summary", _:
                return {"base-memory": GIB}
            case "query-balloon", _:
                return {"actual": self.size}
            case "balloon", _:
                self.size = arguments["value"]
                self.targets.append(self.size)
            case "qom-get", "guest-stats":
                self.updates += not self.hangs
                sent = {
                    f"stat-{name.replace('_', '-')}": value for name, value in self.sent.items()
                }
                return {"last-update": self.updates, "stats": sent}
            case "qom-get", "guest-stats-polling-interval":
                return 0
            case "qom-get", "deflate-on-oom":
                return False
        return {}


GOOD = stats(1000, 800)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="kz-ab-") as name:
        yield Path(name)


def qemu(
    place: Path,
    sent: dict[str, Any] = GOOD,
    answers: Callable[[str], bytes | None] = lambda _: None,
) -> Qemu:
    return Qemu(place / str(len([*place.iterdir()])), sent, answers)


def guest(path: Path, kind: str = "qmp") -> autoballoon.Guest:
    return autoballoon.Guest(f"{kind}:{path}", USUAL, threading.Event())


@pytest.mark.parametrize("name", LIES)
def test_a_guest_that_lies_gets_its_memory_back(place: Path, name: str) -> None:
    vm = qemu(place)
    one = guest(vm.path)
    one.turn()
    assert vm.targets == [896 * MIB] and one.failure == ""
    vm.sent = LIES[name]
    one.turn()
    one.turn()
    assert vm.targets == [896 * MIB, GIB] and "statistics" in one.failure
    vm.sent = GOOD  # it is believed again
    one.turn()
    assert vm.targets[2:] == [896 * MIB] and one.failure == ""


def test_a_guest_without_new_statistics_gets_its_memory_back(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoballoon, "ANSWER_S", 0.5)
    monkeypatch.setattr(USUAL, "interval", 0.1)
    vm = qemu(place)
    one = guest(vm.path)
    one.turn()
    vm.hangs = True
    one.turn()
    assert vm.targets == [896 * MIB, GIB] and one.failure.startswith("No new statistics")


BAD = {
    "silent": b"",
    "no JSON": b"what?\n",
    "no object": b"[]\n",
    "an error": b'{"error": {"desc": "no"}}\n',
    "an empty error": b'{"error": 5}\n',
    "half a line": b'{"return"',
    "deep": b"[" * 100_000 + b"\n",
    "endless": b"x" * (1 << 21),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["greeting", "query-balloon", "balloon"])
def test_a_monitor_that_does_not_answer_leaves_the_target(
    place: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    monkeypatch.setattr(autoballoon, "ANSWER_S", 0.4)
    vm = qemu(place, answers=lambda one: BAD[name] or b" " if one == command else None)
    one = guest(vm.path)
    one.turn()
    assert vm.targets == [] and one.channel is None and one.failure.startswith("No connection: ")
    monkeypatch.undo()
    vm.answers = lambda _: None  # the next turn connects again
    one.turn()
    assert vm.targets == [896 * MIB] and one.failure == ""


def test_the_control_socket_of_the_daemon(place: Path) -> None:
    held, asked = [256 * MIB], list[dict[str, Any]]()
    answers: dict[str, dict[str, Any]] = {"stats": {"stats": stats(1000, 600)}}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        if request["command"] == "target":
            held[0] = request.get("bytes", held[0])
        regions = [{"bytes": GIB // 4}, {"bytes": GIB - GIB // 4}]
        about = {"regions": regions, "features": ["deflate-on-oom"]}
        return {"ok": True, "actual": held[0], **about, **answers.get(request["command"], {})}

    class Daemon(Qemu):
        def talk(self, connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
                for line in lines:
                    connection.sendall(json.dumps(answer(json.loads(line))).encode() + b"\n")

    one = guest(Daemon(place / "control", {}, lambda _: None).path, "control")
    one.turn()
    # Of 744 MiB 144 are used, and 272 are needed with the margin; one step is taken.
    assert one.failure == "" and held == [384 * MIB]
    answers["stats"] = {"ok": False, "error": "the guest does not answer"}
    one.turn()
    assert held == [0] and "the guest does not answer" in one.failure


Start = Callable[..., "subprocess.Popen[str]"]
# The time to answer is shorter than usual.
PROGRAM = (
    "import sys; from tools.autoballoon import autoballoon as a; a.ANSWER_S = 2; sys.exit(a.main())"
)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts it with arguments; ended with the test."""
    started = []

    def begin(*arguments: str, program: tuple[str, ...] = ("-c", PROGRAM)) -> subprocess.Popen[str]:
        argv = [sys.executable, *program, *arguments]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(argv, cwd=REPO, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_guests_that_fail_delay_no_other(place: Path, start: Start) -> None:
    good, liar = qemu(place), qemu(place, LIES["negative"])
    silent = qemu(place, answers=lambda _: b" ")
    paths = [silent.path, liar.path, place / "nobody", good.path]
    process = start("--interval", "1", *(f"qmp:{path}" for path in paths))
    until(lambda: len(good.targets) >= 2)
    process.send_signal(signal.SIGTERM)
    said, failures = process.communicate(timeout=60)
    assert process.returncode == 0
    assert good.targets[-1] == GIB and good.targets[0] == 896 * MIB and liar.targets == [GIB]
    assert f"qmp:{good.path}: target 1024 MiB: autoballoon ends" in said
    for path, what in zip(
        paths, ("No connection: ", "Impossible statistics: ", "No connection: "), strict=False
    ):
        # What, why, what to do; each once.
        assert re.findall(rf"(?m)^autoballoon: qmp:{path}: {what}.+; .+$", failures)
        assert failures.count(f"{path}: {what}") == 1


@pytest.mark.parametrize(("sent", "code"), [(GOOD, 0), (LIES["negative"], 1)])
def test_once_leaves_the_target_and_a_dry_run_sets_none(
    place: Path, start: Start, sent: dict[str, Any], code: int
) -> None:
    vm = qemu(place, sent)
    process = start("--once", "--dry-run", f"qmp:{vm.path}")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == code and vm.targets == [] and "would set" in said
    process = start("--once", f"qmp:{vm.path}")
    process.communicate(timeout=60)
    assert process.returncode == code and vm.targets == [896 * MIB if code == 0 else GIB]


@pytest.mark.parametrize(
    "words", [(), ("--free", "0", "qmp:x"), ("--step", "x", "qmp:x"), ("x",), ("--no", "qmp:x")]
)
def test_bad_usage_has_three_parts(start: Start, words: tuple[str, ...]) -> None:
    process = start(*words)
    assert re.fullmatch(
        r"autoballoon: Bad usage: .+; see autoballoon --help\n", process.communicate(timeout=60)[1]
    )
    assert process.returncode == 2


def test_it_names_its_version(start: Start) -> None:
    process = start("--version")
    told = process.communicate(timeout=60)[0]
    assert (process.returncode, told) == (0, "autoballoon 1.0\n")


def test_it_is_installed_with_its_manual(tmp_path: Path) -> None:
    argv = ["make", "-C", str(FOLDER), "install", "PREFIX=/usr", f"DESTDIR={tmp_path}"]
    subprocess.run(argv, check=True, capture_output=True)
    told = subprocess.run(
        [tmp_path / "usr/bin/autoballoon", "--help"], capture_output=True, text=True, check=True
    )
    page = (
        (tmp_path / "usr/share/man/man1/autoballoon.1")
        .read_text(encoding="utf-8")
        .replace("\\-", "-")
    )
    options = re.findall(r"^  (?:-h, )?(--[a-z-]+)", told.stdout, re.MULTILINE)
    assert len(options) > 3 and all(option in page for option in options)
    assert "Exit: 0" in told.stdout


@pytest.mark.boots
@pytest.mark.parametrize("kind", ["qmp", "control"])
def test_a_real_guest(kind: str, place: Path, start: Start) -> None:
    path, qemu = place / "qmp", kind == "qmp"
    more: dict[str, Any] = {"devices": ["daemon,deflate-on-oom=on"]}
    if qemu:
        more["devices"] = [balloon.device(deflate_on_oom="on")]
        more["extra_qemu"] = ["-qmp", f"unix:{path},server=on,wait=off"]
    with running(BootSpec(memory="1G", command=["sh", "-c", LOOP], **more)) as vm:
        side = Side("guest", vm)
        side.sh("true")
        name = f"qmp:{path}" if qemu else f"control:{vm.daemon and vm.daemon.control}"
        program = (str(FOLDER / "autoballoon.py"),)
        process = start("--interval", "1", "--step", "512", name, program=program)
        free = "awk '/^MemFree:/ { print int($2 / 1024) }' /proc/meminfo"
        until(lambda: side.number(free) < 256)
        assert side.number(free) > 64  # the margin is left
        # More than is free: the balloon gives it, and no program is killed.
        assert side.json("burst", "0:512:3000")["bytes"] == 512 * MIB
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
        until(lambda: balloon.held(vm) == 0)
        assert side.number("awk '/^oom_kill / { print $2 }' /proc/vmstat") == 0
