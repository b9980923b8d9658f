# SPDX-License-Identifier: GPL-2.0
"""``kz conform``: honest devices pass, and each lie is found and named."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from lab.boot import accel, argv, conform, resolve
from lab.build import daemon
from lab.core.errors import TestFailure, UsageError
from tests.guest.guests import CHECKED

pytestmark = pytest.mark.boots

KERNEL_READS = "reported memory, checked by the kernel"
REPORTED, INFLATED = "reported memory reads as zero", "inflated pages read as zero"
# The rows that must find each lie, and a part of their message.
LIES = {
    "no-discard": {
        KERNEL_READS: "the kernel found",
        REPORTED: "nothing was discarded",
        INFLATED: "the pages that are zero make 0x00",
    },
    "full-length": {
        "bit 6 declined": "used length 2097152",
        "a report with": "used length 4096",
        "poison": "used length 2097152",
        "bit 7 declined": "used length 2",
    },
    "bit-order": {INFLATED: "it begins with the most significant bit"},
    "stale-bitmap": {INFLATED: "the bitmap was not written"},
    "short-length": {
        REPORTED: "used length 2048 for 4096 bytes",
        INFLATED: "used length 1 for 9 pages",
    },
    "bit6": {REPORTED: "bit 6 means something else here"},
}
# QEMU's own balloon numbers its queues by the bits that it offers, not by those that are
# negotiated.
QUEUES = "each subset of queues"
REBOOT = "reboot by kexec in the middle of reports"
HONEST = ["--stats-interval", "0", "--device-init-on-inflate", "on"]
SHARED = [
    "-object",
    "memory-backend-memfd,id=m,size={memory},share=on",
    "-machine",
    "memory-backend=m",
]
Table = dict[str, tuple[str, str]]


def qemu(named: str | None, *more: str) -> list[str]:
    program = resolve.qemu(named)
    chosen = accel.choose("auto", program).name
    return [
        str(program),
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-machine",
        "q35",
        *argv.cpu(chosen),
        "-m",
        "{memory}",
        "-kernel",
        "{kernel}",
        "-initrd",
        "{initrd}",
        "-append",
        "{append}",
        "-serial",
        "stdio",
        *more,
    ]


def front_end(device: daemon.Daemon, number: int, kind: str = argv.GENERIC) -> list[str]:
    return [
        "-chardev",
        f"socket,id=c{number},path={device.socket}",
        "-device",
        f"{kind},chardev=c{number},addr={number + 16:#x}",
    ]


@contextlib.contextmanager
def devices(binary: Path, options: Sequence[Sequence[str]]) -> Iterator[list[daemon.Daemon]]:
    with contextlib.ExitStack() as stack:
        found = []
        for more in options:
            found.append(daemon.Daemon(binary, [*HONEST, *more]))
            stack.callback(found[-1].close)
        yield found


def rows(lines: Iterable[str]) -> Table:
    """The rows of one device: check -> (result, seen)."""
    found: Table = {}
    for line in lines:
        if row := re.fullmatch(
            r"\| (.+?) \| (PASS|FAIL|NOT OFFERED|NOT RUN) \| (.*) \|", line.strip()
        ):
            assert row[1] not in found, line
            found[row[1]] = (row[2], row[3])
    return found


def tables(
    command: Sequence[str],
    arch: str = "x86_64",
    memory: str = "384M",
    pid: int | None = None,
    kernel: str = CHECKED,
) -> list[Table]:
    """The table of each device."""
    lines = conform.check(command, kernel=kernel, arch=arch, memory=memory, timeout=900, pid=pid)
    print("\n".join(lines))
    starts = [number for number, line in enumerate(lines) if line.startswith("**")]
    return [
        rows(lines[start:end]) for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]


def verdict(table: Table, check: str) -> tuple[str, str]:
    """Result and message of the one check whose name begins so."""
    (found,) = [seen for name, seen in table.items() if name.startswith(check)]
    return found


def failed(table: Table, known: str = "") -> list[str]:
    bad = [f"{name}: {seen}" for name, (result, seen) in table.items() if result == "FAIL"]
    return [row for row in bad if not known or not row.startswith(known)]


def test_our_qemu() -> None:
    options = "free-page-reporting=on,device-init-on-inflate=on,deflate-on-oom=on,packed=on"
    (table,) = tables(qemu(None, "-device", f"virtio-balloon-pci,{options}"))
    assert failed(table, QUEUES) == []
    for check in ("host memory", REPORTED, INFLATED, KERNEL_READS, "packed rings", "out of memory"):
        assert verdict(table, check)[0] == "PASS"
    assert verdict(table, "legacy interface") == ("PASS", "transitional device")


@pytest.mark.nightly
def test_a_legacy_device_and_a_reboot() -> None:
    """The debug kernel drives a legacy device, without bits 6 and 7 (DRV6.13, DRV7.15), and has
    kexec.
    """
    old = "virtio-balloon-pci,disable-modern=on,free-page-reporting=on,device-init-on-inflate=on"
    with devices(daemon.build(), [[]]) as (device,):
        command = qemu(None, *SHARED, "-device", old, *front_end(device, 0, argv.FRONT_END))
        legacy, honest = tables(command, kernel="debug")
    assert failed(legacy) == [
        "legacy interface: bits 6 and 7 without VIRTIO_F_VERSION_1: no driver may accept that "
        "(DRV6.13, DRV7.15)"
    ]
    assert " 0.0 % of the zeroing skipped" in verdict(legacy, KERNEL_READS)[1]
    assert verdict(legacy, "modern interface")[0] == "NOT OFFERED"
    assert failed(honest) == []
    assert verdict(honest, REBOOT)[0] == "PASS"


def test_a_lie_after_a_reboot() -> None:
    with devices(daemon.build_lying(), [["--lie", "no-discard"]]) as (device,):
        command = qemu("stock", *SHARED, *front_end(device, 0))
        # The probe adds this to the command line of the second kernel.
        command = [word.replace("{append}", "{append} conform=0") for word in command]
        lines = conform.check(
            command, kernel=CHECKED, arch="x86_64", memory="288M", timeout=900, pid=None
        )
    result, seen = rows(lines)[REBOOT]
    assert result == "FAIL" and "the kernel found" in seen


def test_a_guest_that_does_not_come_back() -> None:
    text = "| a check | PASS |  |\nconform: kexec\nno memory to start"
    command = [sys.executable, "-c", f"print({text!r})", "{kernel} {initrd} {append}"]
    lines = conform.check(
        command, kernel=CHECKED, arch="x86_64", memory="512M", timeout=60, pid=None
    )
    assert rows(lines)[REBOOT] == ("FAIL", "no memory to start")


@pytest.mark.nightly
def test_the_balloon_of_stock_qemu() -> None:
    (table,) = tables(qemu("stock", "-device", "virtio-balloon-pci,free-page-reporting=on"))
    assert failed(table, QUEUES) == []
    assert verdict(table, REPORTED)[0] == "NOT OFFERED"
    assert verdict(table, "host memory")[0] == "PASS"


@pytest.mark.nightly
def test_stock_qemu_as_in_the_documents() -> None:
    (table,) = tables([str(daemon.build()), "run", *HONEST, "--", *qemu("stock", *SHARED)])
    assert failed(table) == []
    assert verdict(table, "host memory")[0] == "PASS"


@pytest.mark.nightly
def test_user_mode_linux_and_the_daemon_with_a_process_that_was_there_before(
    tmp_path: Path,
) -> None:
    """The command is a client of the process that becomes the VMM.

    Its own memory does not shrink.
    """
    ask, answer = tmp_path / "ask", tmp_path / "answer"
    for pipe in (ask, answer):
        os.mkfifo(pipe)
    server = (
        "import os, sys; words = open(sys.argv[1]).read().splitlines(); "
        "os.dup2(os.open(sys.argv[2], os.O_WRONLY), 1); os.execv(words[0], words)"
    )
    client = f'printf "%s\\n" "$@" > {ask}; exec cat {answer}'
    with (
        devices(daemon.build(), [["--user-mode-linux"]]) as (device,),
        subprocess.Popen([sys.executable, "-c", server, ask, answer]) as vmm,
    ):
        try:
            words = ["{kernel}", "mem={memory}", "initrd={initrd}", "{append}"]
            words.append(f"virtio_uml.device={device.socket}:5")
            (table,) = tables(["sh", "-c", client, "sh", *words], "um", "288M", vmm.pid, "debug")
        finally:
            vmm.kill()
    assert failed(table) == []
    assert verdict(table, "host memory")[0] == "PASS"
    assert verdict(table, "queues, lengths")[0] == "NOT RUN"


def test_stock_qemu_with_a_correct_daemon_and_false_ones() -> None:
    """One guest has all of them.

    The kernel trusts none after the first lie, so no-discard is the first liar.
    """
    with devices(daemon.build_lying(), [[], *(["--lie", lie] for lie in LIES)]) as devices_found:
        ends = [
            word
            for number, device in enumerate(devices_found)
            for word in front_end(device, number)
        ]
        honest, *lying = tables(qemu("stock", *SHARED, *ends))
    assert failed(honest) == []
    for check in ("host memory", KERNEL_READS, REPORTED, INFLATED):
        assert verdict(honest, check)[0] == "PASS"
    missed = {
        (lie, check): verdict(table, check)
        for table, (lie, messages) in zip(lying, LIES.items(), strict=True)
        for check, message in messages.items()
        if verdict(table, check)[0] != "FAIL" or message not in verdict(table, check)[1]
    }
    assert missed == {}
    assert {verdict(table, KERNEL_READS)[0] for table in lying[1:]} == {"NOT RUN"}


def test_the_bundle_boots_without_the_lab(tmp_path: Path) -> None:
    conform.bundle(tmp_path / "conform.tar.gz", CHECKED)
    subprocess.run(["tar", "-xf", tmp_path / "conform.tar.gz", "-C", tmp_path], check=True)
    folder = tmp_path / "conform"
    assert {file.name for file in folder.iterdir()} == {"bzImage", "initramfs", "README"}
    (append,) = re.findall(r"^ {4}(console=.*)$", (folder / "README").read_text(), re.MULTILINE)
    values = {
        "{kernel}": "bzImage",
        "{initrd}": "initramfs",
        "{append}": append,
        "{memory}": "768M",
    }
    words = qemu("stock", "-device", "virtio-balloon-pci,free-page-reporting=on")
    console = subprocess.run(
        [values.get(word, word) for word in words],
        cwd=folder,
        capture_output=True,
        timeout=600,
        check=True,
    )
    table = rows(console.stdout.decode(errors="replace").splitlines())
    assert failed(table, QUEUES) == []
    assert verdict(table, "half of the memory")[0] == "PASS"
    assert verdict(table, REPORTED)[0] == "NOT OFFERED"


def test_a_guest_that_does_not_get_there() -> None:
    command = [sys.executable, "-c", "print('{kernel} {initrd} {append}')"]
    with pytest.raises(TestFailure, match="did not get to the end"):
        tables(command)


@pytest.mark.parametrize("command", [["true"], ["no-such-vmm", "{kernel}", "{initrd}", "{append}"]])
def test_bad_commands(command: list[str]) -> None:
    with pytest.raises(UsageError, match="Bad command"):
        tables(command)


def test_a_process_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="Bad --pid"):
        tables(["true", "{kernel}", "{initrd}", "{append}"], pid=1 << 30)


def test_the_host_did_not_get_it_back() -> None:
    assert "FAIL" in conform.host_row(900 << 20, 890 << 20, 400 << 20)
    assert "PASS" in conform.host_row(900 << 20, 510 << 20, 400 << 20)
    # A small guest has as many small pieces as a large one, and does not report them.
    assert "PASS" in conform.host_row(379 << 20, 331 << 20, 61 << 20)
    assert "FAIL" in conform.host_row(379 << 20, 340 << 20, 61 << 20)
    assert "FAIL" in conform.host_row(100 << 20, 95 << 20, 12 << 20)
