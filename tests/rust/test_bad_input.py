# SPDX-License-Identifier: GPL-2.0
"""Wrong options, paths and control requests.

An error says what, why and what helps, and nothing changes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import devices
from tests.hostile.peer import Device, eventually

pytestmark = pytest.mark.slow
NOBODY = 65534
# The three parts of an error: failure with the value, reason, remedy. The second form is clap's.
OWN = re.compile(
    r"^(vhost-user-balloon: |\s*ERROR )(cannot|the balloon) [^:]+: .+; .+$", re.M | re.S
)
USAGE = re.compile(r"^error: .+\n.*(For more information, try '--help'|\[possible values: )", re.S)
# Options, the exit code, what the error names. {d}: a folder.
OPTIONS: dict[str, tuple[list[str], int, str]] = {
    "no option": ([], 2, "--socket-path or --fd"),
    "unknown": (["--socket-pth", "x"], 2, "--socket-pth"),
    "a value is missing": (["--socket-path"], 2, "--socket-path <PATH>"),
    "both front ends": (
        ["--socket-path", "{d}/a", "--fd", "3"],
        2,
        "cannot be used with '--fd <FD>'",
    ),
    "an argument": (["--socket-path", "{d}/a", "extra"], 2, "extra"),
    "unknown subcommand": (["inflate"], 2, "inflate"),
    "options and a subcommand": (["--fd", "3", "status", "--control", "x"], 2, "status"),
    "--fd of no number": (["--fd", "one"], 2, "'one' for '--fd <FD>'"),
    "--fd below 0": (["--fd=-1"], 1, "descriptor -1"),
    "--fd of standard error": (["--fd", "2"], 1, "descriptor 2"),
    "--fd that is closed": (["--fd", "77"], 1, "descriptor 77"),
    "--target": (["--fd", "3", "--target", "lots"], 2, "'lots' for '--target <SIZE>'"),
    "--target below 0": (["--fd", "3", "--target=-1"], 2, "'-1' for '--target <SIZE>'"),
    "--target too large": (
        ["--fd", "3", "--target", "99999999999T"],
        2,
        "99999999999T is too large",
    ),
    "--discard-unit": (["--fd", "3", "--discard-unit", "3M"], 2, "a power of two from 4K to 1G"),
    "--stats-interval": (["--fd", "3", "--stats-interval", "1.5"], 2, "--stats-interval <SECONDS>"),
    **{
        name: (["--fd", "3", name, "maybe"], 2, f"'maybe' for '{name} ")
        for name in (
            "--free-page-reporting",
            "--device-init-reported",
            "--device-init-on-inflate",
            "--report-now",
            "--deflate-on-oom",
            "--discard",
            "--seccomp",
            "--landlock",
            "--log-level",
            "--log-format",
        )
    },
    "--inhibit-one-in": (
        ["--fd", "3", "--inhibit-one-in", "0"],
        2,
        "'0' for '--inhibit-one-in <NUMBER>'",
    ),
    "--print-qemu-args": (["--print-qemu-args"], 2, "--socket-path <PATH>"),
    "no folder": (["--socket-path", "{d}/no/a"], 1, "{d}/no/a: there is no folder {d}/no; make it"),
    "no socket": (
        ["--socket-path", "{d}/file"],
        1,
        "{d}/file: a file that is no socket is there; remove it",
    ),
    "a file as folder": (
        ["--socket-path", "{d}/file/a"],
        1,
        "cannot listen on {d}/file/a: Not a directory",
    ),
    "a folder": (
        ["--socket-path", "{d}"],
        1,
        "cannot listen on {d}: a file that is no socket is there",
    ),
    "too long": (["--socket-path", "{d}/" + "x" * 108], 1, "a socket's at most 107"),
    "taken": (
        ["--socket-path", "{d}/taken"],
        1,
        "{d}/taken: another process listens there; end it",
    ),
    "control is too long": (
        ["--socket-path", "{d}/a", "--control", "{d}/" + "x" * 108],
        1,
        "a socket's at most 107",
    ),
    "no folder for control": (
        ["--socket-path", "{d}/a", "--control", "{d}/no/a"],
        1,
        "{d}/no/a: there is no folder {d}/no",
    ),
    "control is taken": (
        ["--socket-path", "{d}/a", "--control", "{d}/taken"],
        1,
        "cannot listen on {d}/taken",
    ),
    "metrics are taken": (
        ["--socket-path", "{d}/a", "--metrics-socket", "{d}/file"],
        1,
        "cannot listen on {d}/file",
    ),
    "no folder for the state": (
        ["--socket-path", "{d}/a", "--state", "{d}/no/s"],
        1,
        "state file {d}/no/s",
    ),
    "no state": (
        ["--socket-path", "{d}/a", "--state", "{d}/file"],
        1,
        '{d}/file: "precious" is no state',
    ),
    "a link as state": (
        ["--socket-path", "{d}/a", "--state", "{d}/link"],
        1,
        "state file {d}/link: Too many levels of symbolic links",
    ),
    "no control": (["status"], 2, "--control <PATH>"),
    "no device at --control": (["status", "--control", "{d}/no"], 1, "a device at {d}/no"),
    "target of nothing": (["target", "--control", "{d}/taken", "x"], 2, "'x' for '[SIZE]'"),
    "wait for nothing": (["target", "--control", "{d}/taken", "--wait", "1"], 2, "<SIZE>"),
    "wait for no time": (
        ["target", "--control", "{d}/taken", "1M", "--wait", "0"],
        2,
        "'0' for '--wait",
    ),
    "discard": (["discard", "--control", "{d}/taken", "maybe"], 2, "'maybe' for '<STATE>'"),
    "flush": (["flush", "--control", "{d}/taken", "--leave", "x"], 2, "'x' for '--leave <SIZE>'"),
    "flush without time": (
        ["flush", "--control", "{d}/taken", "--timeout", "0"],
        2,
        "'0' for '--timeout",
    ),
    "report": (["report", "--control", "{d}/taken", "--timeout", "x"], 2, "'x' for '--timeout"),
    "report without time": (
        ["report", "--control", "{d}/taken", "--timeout", "0"],
        2,
        "'0' for '--timeout",
    ),
    "report where no device is": (["report", "--control", "{d}/no"], 1, "a device at {d}/no"),
    "run nothing": (["run", "--"], 2, "<COMMAND>"),
    "run private memory": (["run", "--", "qemu"], 1, "no option has share=on"),
    "run what is not there": (["run", "--", "{d}/no", "share=on"], 1, "cannot start {d}/no"),
}
# For another user than root: neither the folder nor the socket is its own.
FOREIGN: dict[str, tuple[list[str], int, str]] = {
    "a folder of others": (
        ["--socket-path", "{d}/a"],
        1,
        "this user may not write to {d}; choose another path",
    ),
    "a socket of others": (
        ["--socket-path", "{d}/taken"],
        1,
        "{d}/taken: it is a socket of user 0; choose",
    ),
    "metrics in a folder of others": (
        ["--socket-path", "/tmp/kz-bad-input", "--metrics-socket", "{d}/a"],
        1,
        "cannot listen on {d}/a: this user may not write to {d}; choose another path",
    ),
    "the state of others": (
        ["--socket-path", "/tmp/kz-bad-input", "--state", "{d}/file"],
        1,
        "{d}/file",
    ),
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that others can look into, with a program, a file, a link and a socket that is
    listened on.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kz-bad-") as name,
        socket.socket(socket.AF_UNIX) as taken,
    ):
        made = Path(name)
        made.chmod(0o755)
        shutil.copy(devices.program(), made / "program")
        (made / "file").write_text("precious")
        (made / "link").symlink_to("file")
        taken.bind(str(made / "taken"))
        (made / "taken").chmod(0o600)
        taken.listen()
        yield made


def refused(folder: Path, case: tuple[list[str], int, str], user: int | None = None) -> None:
    arguments, code, names = case
    argv = [
        str(folder / "program"),
        *(argument.replace("{d}", str(folder)) for argument in arguments),
    ]
    before = sorted(path.name for path in folder.iterdir())
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        stdin=subprocess.DEVNULL,
        user=user,
        group=user,
    )
    assert done.returncode == code, done
    assert done.stdout == ""
    assert names.replace("{d}", str(folder)) in done.stderr
    assert OWN.search(done.stderr) or USAGE.search(done.stderr), done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (folder / "file").read_text() == "precious"


@pytest.mark.parametrize("name", OPTIONS)
def test_options(folder: Path, name: str) -> None:
    refused(folder, OPTIONS[name])


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_what_belongs_to_others(folder: Path, name: str) -> None:
    refused(folder, FOREIGN[name], user=NOBODY)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_without_threads(folder: Path) -> None:
    """The limit of processes is reached."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o777)
        done = subprocess.run(
            [folder / "program", "--socket-path", f"{name}/a"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            user=NOBODY,
            group=NOBODY,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (0, 0)),
        )
        assert done.returncode == 1
        assert (
            OWN.search(done.stderr) and "allow this user twelve threads (ulimit -u)" in done.stderr
        ), done.stderr


def test_the_longest_path(folder: Path) -> None:
    """107 bytes are a socket, and 108 are an error that counts them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        path = Path(name) / ("x" * (107 - len(name) - 1))
        refused(
            folder,
            (["--socket-path", f"{path}x"], 1, f"{path}x: the path has 108 bytes, a socket's"),
        )
        with subprocess.Popen(
            [folder / "program", "--socket-path", path], stderr=subprocess.DEVNULL
        ) as one:
            try:
                assert eventually(path.exists)
            finally:
                one.terminate()
        assert one.returncode == 0


def test_the_only_front_end_breaks_the_protocol() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = theirs.fileno()
        ours.sendall(b"\xff" * 12)
        done = subprocess.run(
            [devices.program(), f"--fd={fd}"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            pass_fds=[fd],
        )
    assert done.returncode == 1
    assert OWN.search(done.stderr) and "does not keep to the protocol" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.0 400 Bad Request\r\n", b"{}\n", b"", b'{"ok":true}\n']
)
def test_a_control_socket_of_another_program(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "control"

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        server = threading.Thread(target=serve, args=[listener])
        server.start()
        argv = [str(devices.program()), "target", "--control", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
        server.join()
    assert (done.returncode, done.stdout) == (1, "")
    assert OWN.search(done.stderr) and "give --control a vhost-user-balloon's" in done.stderr, (
        done.stderr
    )


def test_every_option_has_a_case() -> None:
    text = subprocess.run(
        [devices.program(), "--help"], capture_output=True, text=True, check=True
    ).stdout
    options = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", text, re.M)) - {"--help", "--version"}
    given = {word for arguments, _, _ in OPTIONS.values() for word in arguments}
    # These take no value, or one more of a kind that is here.
    assert options - given == {"--memory-is-shared", "--print-capabilities", "--user-mode-linux"}


# A request and what the error names. Each comes to a device whose target is 8 MiB and that does not
# discard.
REQUESTS = {
    b"": "EOF",
    b"status": "expected value",
    b"[]": "missing field `command`",
    b"{}": "missing field `command`",
    b'{"command":"quit"}': "unknown variant `quit`",
    b'{"command":"metrics"}': "unknown variant `metrics`",
    b'{"command":"target","bytes":-1}': "-1",
    b'{"command":"target","bytes":1.5}': "1.5",
    b'{"command":"target","bytes":18446744073709551616}': "1.8446744073709552e+19",
    b'{"command":"target","bytes":"1G"}': "1G",
    b'{"command":"target","byte":1}': "unknown field `byte`",
    b'{"command":"discard"}': "missing field `enabled`",
    b'{"command":"discard","enabled":"on"}': 'string "on"',
    b'{"command":"discard","enabled":true,"enabled":false}': "duplicate field",
    b'{"command":"status"} {}': "trailing characters",
    b'{"command":"stats"}': "no driver with a queue for them has started",
    b"\xff\xfe": "expected value",
}


def test_control_requests(tmp_path: Path) -> None:
    state = tmp_path / "state"
    device = Device(devices.program(), "--state", str(state))
    try:
        assert device.ask(command="target", bytes=8 << 20)["ok"] is True
        assert device.ask(command="discard", enabled=False)["ok"] is True
        before, kept = device.status(), state.read_text()
        for request, names in REQUESTS.items():
            with device.connect() as connection, connection.makefile("rb") as answers:
                connection.sendall(request + b"\n")
                answer = json.loads(answers.readline())
            assert answer["ok"] is False, request
            assert names in answer["error"], (request, answer)
            assert re.search(r"^cannot .+: .+; .+$", answer["error"], re.S), answer
        assert device.status() == before
        assert state.read_text() == kept
    finally:
        device.close()
