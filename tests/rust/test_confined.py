# SPDX-License-Identifier: GPL-2.0
"""The README's table of what confines the daemon, by itself and by the systemd unit.

Each row, as it runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.build import daemon
from lab.core import paths
from tests import devices
from tests.hostile.peer import MIB, Device, FrontEnd

pytestmark = pytest.mark.slow
README = daemon.WORKSPACE / "README.md"
UNIT = paths.REPO / "packaging" / "systemd" / "vhost-user-balloon@.service"
SANDBOX = daemon.WORKSPACE / "daemon" / "src" / "sandbox.rs"


def status(device: Device, name: str) -> str:
    text = Path(f"/proc/{device.process.pid}/status").read_text()
    return next(line for line in text.splitlines() if line.startswith(f"{name}:")).split(None, 1)[1]


def namespaces(pid: int | str) -> dict[str, str]:
    return {entry.name: os.readlink(entry) for entry in Path(f"/proc/{pid}/ns").iterdir()}


def calls(device: Device) -> None:
    for task in Path(f"/proc/{device.process.pid}/task").iterdir():
        assert re.search(r"^Seccomp:\t2$", (task / "status").read_text(), re.M), task
    # Nor can it remove, rename or make a file.
    assert not re.findall(
        r"\bSYS_(?:unlink|rename|open|link|mkdir|symlink)\w*", SANDBOX.read_text()
    )


def landlock(device: Device) -> None:
    how = str(device.status()["sandbox"])
    assert how.startswith("seccomp, ")
    # A kernel without landlock is named; the tests of the workspace see that files are given up.
    assert "landlock" in how and "switched off" not in how


def user(device: Device) -> None:
    assert status(device, "Uid").split() == [str(os.geteuid())] * 4


def privileges(device: Device) -> None:
    assert status(device, "NoNewPrivs") == "1"


def own_namespaces(device: Device) -> None:
    assert namespaces(device.process.pid) == namespaces("self")


def dumps(device: Device) -> None:
    smaps = Path(f"/proc/{device.process.pid}/smaps").read_text()
    guest = [
        part
        for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.M)
        if "memfd:guest" in part
    ]
    flags = [re.search(r"^VmFlags: (.*)$", part, re.M) for part in guest]
    assert flags
    assert all(found and "dd" in found[1].split() for found in flags)


def own_memory(device: Device) -> None:
    assert device.about("RssAnon") < 8 << 10


def charge(_device: Device) -> None:
    limit = re.search(r"MAX_FAULTED: u64 = (\d+) << 20", (SANDBOX.parent / "charge.rs").read_text())
    assert limit and f"| {limit[1]} MiB, and 64 huge pages of each size |" in README.read_text()


# By row: what the daemon does when it is started by hand, and what the unit sets.
ROWS: dict[str, tuple[Callable[[Device], None], dict[str, str]]] = {
    "system calls": (
        calls,
        {"SystemCallFilter": "@system-service", "SystemCallArchitectures": "native"},
    ),
    "files, network, signals": (
        landlock,
        {
            "ProtectSystem": "strict",
            "ProtectHome": "yes",
            "PrivateNetwork": "yes",
            "PrivateDevices": "yes",
        },
    ),
    "user": (user, {"DynamicUser": "yes", "CapabilityBoundingSet": "", "AmbientCapabilities": ""}),
    "new privileges": (privileges, {"NoNewPrivileges": "yes", "RestrictSUIDSGID": "yes"}),
    "namespaces": (
        own_namespaces,
        {"PrivateUsers": "yes", "PrivateNetwork": "yes", "PrivateIPC": "yes", "PrivateTmp": "yes"},
    ),
    "core dumps": (dumps, {}),
    "own memory": (own_memory, {"MemoryMax": "256M"}),
    "guest memory it is charged for": (charge, {"Slice": "machine.slice"}),
}


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    one = Device(devices.program(), "--user-mode-linux")
    with FrontEnd(one) as vm:
        vm.start()
        vm.fill(4 * MIB, MIB)
        yield one
    one.close()


def test_the_table_has_these_rows() -> None:
    table = (
        README.read_text()
        .split("| | by itself | by the systemd unit |\n|---|---|---|\n")[1]
        .split("\n\n")[0]
    )
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()] == list(ROWS)


def test_each_thread_has_a_row(device: Device) -> None:
    """Of the table of what a thread may touch; its filter is that of its name."""
    tasks = Path(f"/proc/{device.process.pid}/task").iterdir()
    names = [(task / "comm").read_text().strip() for task in tasks]
    table = README.read_text().split("| thread | touches |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([\w-]+)`(?: \((\d)\))?", table, re.M)
    assert {name: names.count(name) for name in names} == {
        name: int(count or 1) for name, count in rows
    }


@pytest.mark.parametrize("row", ROWS)
def test_by_itself(device: Device, row: str) -> None:
    ROWS[row][0](device)


@pytest.mark.parametrize("row", ROWS)
def test_by_the_unit(row: str) -> None:
    # The first line of a setting that is given twice.
    found = dict(reversed(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.M)))
    assert {name: found.get(name) for name in ROWS[row][1]} == ROWS[row][1]
