# SPDX-License-Identifier: GPL-2.0
"""A guest's command has its stdin, however late the channel comes up.

Without it a shell ends at once.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lab.bench.session import LOOP, Side
from lab.boot import argv, console, resolve
from lab.boot.guest import Guest
from lab.boot.spec import BootSpec
from lab.core.errors import TestFailure

pytestmark = pytest.mark.boots
PORT = "virtserialport,chardev=kzin,name=kz.in"
SPEC = BootSpec(memory="256M", cpus=2, command=["sh", "-c", LOOP], timeout=600.0)


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[str]], list[str]]) -> None:
    """Have QEMU started with other arguments."""
    usual = argv.make
    monkeypatch.setattr(argv, "make", lambda *about: change(usual(*about)))


def wait_for_init(guest: Guest) -> None:
    """Return when the guest's first program has opened the channel that it opens before stdin."""
    for _ in range(3000):
        ports = {port["label"]: port["frontend-open"] for port in guest.qmp("query-chardev")}
        if ports["kzerr"]:
            return
        time.sleep(0.1)
    pytest.fail("the guest's first program does not open its channels")


def without_port(words: list[str]) -> list[str]:
    at = words.index(PORT)
    return words[: at - 1] + words[at + 1 :]


def test_a_port_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guest switches off, and does not run a command without its channels."""
    changed(monkeypatch, without_port)
    # It looks for the port 5,000 times, which takes minutes on a busy machine.
    spec = replace(SPEC, cpus=1, command=["sh", "-c", "echo ran > /dev/console"])
    with contextlib.closing(Guest(spec, resolve.images(spec))) as guest:
        with pytest.raises(TestFailure, match="died before its command reported"):
            guest.wait()
        assert console.no_port(guest.ending().text)
        assert not re.search("^ran", guest.ending().text, re.MULTILINE)


def test_a_port_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, without_port)
    with contextlib.closing(Guest(SPEC, resolve.images(SPEC))) as guest:
        wait_for_init(guest)
        time.sleep(1)
        guest.qmp(
            "device_add", driver="virtserialport", chardev="kzin", name="kz.in", bus="kzserial.0"
        )
        assert Side("late", guest).sh("echo here") == ["here"]


def test_a_host_that_connects_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "in"
    changed(
        monkeypatch,
        lambda argv: [
            f"socket,id=kzin,path={place},server=on,wait=off"
            if word.startswith("socket,id=kzin,")
            else word
            for word in argv
        ],
    )
    with contextlib.closing(Guest(SPEC, resolve.images(SPEC))) as guest:
        wait_for_init(guest)
        time.sleep(1)
        late = socket.socket(socket.AF_UNIX)
        late.connect(str(place))
        guest._ours["in"].close()
        guest._ours["in"] = late
        assert Side("late", guest).sh("echo here") == ["here"]


def test_a_host_that_speaks_before_user_mode_linux_listens() -> None:
    spec = replace(SPEC, arch="um", kernel="debug", cpus=1)
    with contextlib.closing(Guest(spec, resolve.images(spec))) as guest:
        assert Side("um", guest).sh("echo here") == ["here"]
