# SPDX-License-Identifier: GPL-2.0
"""The subcommand report: guests and front ends that do their part, and all others."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.conftest import Start
from tests.hostile.peer import (
    ALL,
    EXTENDED,
    INFLATE,
    MIB,
    PAGE,
    PATIENCE,
    PLAY,
    RAM,
    REPORTING,
    USER,
    Device,
    FrontEnd,
    eventually,
    words,
)

pytestmark = pytest.mark.slow
REPORT_NOW = 1 << 16
CMD, DONE = 16, 20  # offsets in the configuration
UNAVAILABLE, TEMPORARY = 69, 75
LOG_ALL = 1 << 26


class Guest(FrontEnd):
    """A front end that passes notifications on, and its driver."""

    ours: socket.socket

    def __enter__(self) -> Guest:
        return self

    def begin(self, features: int = ALL | REPORT_NOW, config: int = 24) -> None:
        """Start, and read the configuration as a driver does."""
        self.ours, theirs = socket.socketpair()
        self.negotiate(features)
        with theirs:
            assert self.accepted("SET_BACKEND_REQ_FD", b"", [theirs.fileno()])
        assert self.table((0, self.size, USER, 0))
        for ring in range(4):
            self.start_ring(ring)
        self.get("GET_CONFIG", words(0, config, 0) + bytes(config))

    def close(self) -> None:
        """Hang up."""
        if hasattr(self, "ours"):
            self.ours.close()
        super().close()

    def field(self, offset: int) -> int:
        """A field of the configuration."""
        answer = self.get("GET_CONFIG", words(offset, 4, 0) + bytes(4))
        value: tuple[int] = struct.unpack("<I", answer[12:])
        return value[0]

    def commanded(self) -> int:
        """The number of the next command, once the device has announced it."""
        self.ours.settimeout(PATIENCE)
        assert self.ours.recv(12) == words(2, 1, 0)
        number = self.field(CMD)
        assert number not in (0, self.field(DONE))
        return number

    def done(self, number: int) -> None:
        """All was reported."""
        assert self.accepted("SET_CONFIG", words(DONE, 4, 0) + words(number))


@contextlib.contextmanager
def report(device: Device, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The subcommand, while it runs."""
    argv: list[str | Path] = [device.binary, "report", "--control", device.control, *options]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        if process.poll() is None:
            process.kill()


def ended(process: subprocess.Popen[str], code: int, text: str, seconds: float = PATIENCE) -> None:
    """It ends with this exit code and an error of three parts."""
    out, error = process.communicate(timeout=seconds)
    assert (process.returncode, out) == (code, ""), error
    assert error.startswith("vhost-user-balloon: cannot have free memory reported: "), error
    assert text in error and "; " in error, error


def refused(device: Device, code: int, text: str) -> None:
    """It is refused at once."""
    with report(device, "--timeout", "60") as process:
        ended(process, code, text)


@pytest.fixture
def guest(device: Device) -> Iterator[Guest]:
    with Guest(device) as one:
        one.begin()
        yield one


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it prints as JSON."""
    out, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, error) == (0, "")
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_the_host_has_all_that_was_free(guest: Guest) -> None:
    guest.fill(PLAY, 4 * MIB)
    guest.ask(REPORTING, (PLAY, MIB, True))
    assert guest.device.status()["report"] == {"possible": True, "running": False, "why_not": None}
    with report(guest.device, "--json") as process:
        number = guest.commanded()
        assert guest.device.status()["report"]["running"]
        assert guest.ask(REPORTING, (PLAY + MIB, MIB, True)) == MIB
        # A part of it is no memory: nothing of it is answered.
        assert guest.ask(REPORTING, (RAM - PAGE, 2 * PAGE, True)) == 0
        assert guest.ask(REPORTING, (PLAY + 2 * MIB, MIB, True)) == MIB
        assert process.poll() is None
        guest.done(number)
        answer = result(process)
    assert answer["reported"] == answer["discarded"] == 2 * MIB + PAGE
    assert answer["zero"] == 2 * MIB
    assert answer["milliseconds"] >= 0
    assert guest.holds(PLAY, 3 * MIB) == 0
    assert guest.field(CMD) == guest.field(DONE) == number
    with report(guest.device) as process:
        guest.done(guest.commanded())
        out, _ = process.communicate(timeout=PATIENCE)
    assert out.startswith("0 MiB were reported in ") and "0 MiB of it returned as zero" in out
    assert "; 0 MiB were discarded; " in out


@pytest.mark.parametrize("how", ["discard off", "log"])
def test_a_report_of_which_the_host_gets_nothing_fails(guest: Guest, how: str) -> None:
    """Discarding is suspended while it runs."""
    guest.fill(PLAY, 32 * MIB)
    before = guest.blocks()
    with report(guest.device) as process:
        number = guest.commanded()
        if how == "log":
            features = ALL | REPORT_NOW | EXTENDED | LOG_ALL
            assert guest.accepted("SET_FEATURES", struct.pack("=Q", features))
        else:
            guest.device.ask(command="discard", enabled=False)
        assert guest.ask(REPORTING, (PLAY, 32 * MIB, True)) == 0
        guest.done(number)
        ended(process, TEMPORARY, "suspended")
    assert guest.blocks() == before
    assert guest.device.status()["discarded"] == 0
    guest.device.ask(command="discard", enabled=True)
    assert guest.accepted("SET_FEATURES", struct.pack("=Q", ALL | REPORT_NOW | EXTENDED))


def test_a_report_that_discards_nothing_is_none(guest: Guest) -> None:
    """The driver poisons pages, so that nothing of the report is discarded."""
    assert guest.accepted("SET_CONFIG", words(12, 4, 0) + words(0xAA))
    with report(guest.device) as process:
        number = guest.commanded()
        assert guest.ask(REPORTING, (PLAY, MIB, True)) == 0
        guest.done(number)
        ended(process, UNAVAILABLE, "none went back to the host")
    assert guest.accepted("SET_CONFIG", words(12, 4, 0) + words(0))


def test_without_bit_6_nothing_is_known_of_zeros(device: Device) -> None:
    with Guest(device) as guest:
        guest.begin(ALL & ~(1 << 6) | REPORT_NOW)
        with report(device, "--json") as process:
            number = guest.commanded()
            guest.ask(REPORTING, (PLAY, MIB, True))
            guest.done(number)
            assert result(process)["zero"] is None
        with report(device) as process:
            guest.done(guest.commanded())
            assert "does not accept answers about zeros" in process.communicate(timeout=PATIENCE)[0]


def test_a_newer_report_ends_the_older(guest: Guest) -> None:
    with report(guest.device, "--timeout", "60") as old:
        first = guest.commanded()
        guest.ask(REPORTING, (PLAY, MIB, True))
        with report(guest.device, "--timeout", "60", "--json") as new:
            second = guest.commanded()
            assert second != first
            ended(old, TEMPORARY, "a newer report has ended this one")
            # A driver that writes the number of the older one has not done the newer one.
            guest.done(first)
            assert guest.device.status()["report"]["running"] and new.poll() is None
            guest.ask(REPORTING, (PLAY, PAGE, True))
            guest.done(second)
            assert result(new)["reported"] == PAGE


def test_a_report_while_the_guest_inflates(guest: Guest) -> None:
    guest.device.ask(command="target", bytes=8 * MIB)
    assert guest.ours.recv(12)
    with report(guest.device, "--json") as process:
        number = guest.commanded()
        guest.fill(PLAY, 2 * MIB)
        guest.pages(INFLATE, range(PLAY // PAGE, PLAY // PAGE + 256))
        assert guest.ask(REPORTING, (PLAY + MIB, MIB, True)) == MIB
        # A front end that writes all that it knows, with an old number, ends nothing.
        whole = words(0, 512, 0, 0, 0, number - 1)
        assert guest.accepted("SET_CONFIG", words(0, 24, 0) + whole)
        assert process.poll() is None and guest.device.status()["report"]["running"]
        guest.done(number)
        answer = result(process)
        assert (answer["reported"], answer["zero"]) == (MIB, MIB)
    assert guest.device.status()["actual"] == 2 * MIB
    guest.device.ask(command="target", bytes=0)


def test_a_report_while_discarding_is_suspended(guest: Guest) -> None:
    device = guest.device
    with report(device, "--json") as process:
        number = guest.commanded()
        guest.ask(REPORTING, (PLAY, MIB, True))
        device.ask(command="discard", enabled=False)
        assert guest.ask(REPORTING, (PLAY + MIB, MIB, True)) == 0
        guest.done(number)
        ended(process, TEMPORARY, "suspended")
    refused(device, TEMPORARY, "discarding is suspended; use the subcommand discard on")
    assert guest.field(CMD) == number, "nothing was commanded"
    device.ask(command="discard", enabled=True)
    features = struct.pack("=Q", ALL | REPORT_NOW | LOG_ALL | 1 << 30 | 1 << 32)
    assert guest.accepted("SET_FEATURES", features)
    refused(device, TEMPORARY, "while the front end logs writes; try again later")
    assert "not possible: discarding is suspended while" in screen(device)


def screen(device: Device) -> str:
    """The status for people."""
    argv: list[str | Path] = [device.binary, "status", "--control", device.control]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_without_a_driver(device: Device) -> None:
    refused(device, TEMPORARY, "no front end is connected; start the VM")
    with Guest(device) as guest:
        guest.negotiate(ALL | REPORT_NOW)
        assert guest.table((0, RAM, USER, 0))
        refused(device, TEMPORARY, "driver has not started, or has stopped; wait until it runs")
        status = device.status()["report"]
        assert not status["possible"] and "has not started" in status["why_not"]
    with Guest(device) as guest:
        guest.begin()
        guest.stop_ring(REPORTING)
        refused(device, TEMPORARY, "driver has not started, or has stopped; wait until it runs")


@pytest.mark.parametrize(
    ("features", "config", "text"),
    [
        (ALL, 24, "driver has not accepted feature bit 16; use the subcommand flush"),
        # Bit 16 means nothing without reports.
        (0b1101_0111 | REPORT_NOW, 24, "driver has not accepted feature bit 16"),
        (ALL | REPORT_NOW, 16, "reads 16 bytes of the configuration, not 24; start QEMU with"),
    ],
    ids=["driver", "no reports", "front end"],
)
def test_without_the_bit(device: Device, features: int, config: int, text: str) -> None:
    """Everything else works, and the status has the reason."""
    with Guest(device) as guest:
        guest.begin(features, config)
        refused(device, UNAVAILABLE, text)
        assert text in device.status()["report"]["why_not"]
        assert f"report     not possible: the {'front' if config == 16 else 'guest'}" in screen(
            device
        )
        assert device.status()["working"]
        if features & 1 << 5:
            guest.works()


def test_without_a_channel(device: Device) -> None:
    with Guest(device) as guest:
        guest.start(ALL | REPORT_NOW)
        guest.get("GET_CONFIG", words(0, 24, 0) + bytes(24))
        refused(device, UNAVAILABLE, "takes no notification of a changed configuration")


@pytest.mark.parametrize("option", ["--report-now", "--free-page-reporting"])
def test_a_device_that_does_not_offer_it(start: Start, option: str) -> None:
    device = start(option, "off")
    with Guest(device) as guest:
        offered: tuple[int] = struct.unpack("=Q", guest.get("GET_FEATURES"))
        assert not offered[0] & REPORT_NOW
        refused(device, UNAVAILABLE, "does not offer feature bit 16; start it without --report-now")


def test_a_guest_that_never_answers(guest: Guest) -> None:
    device = guest.device
    began, clock = time.monotonic(), device.clock()
    with report(device, "--timeout", "1") as process:
        number = guest.commanded()
        ended(process, TEMPORARY, "not answered within 1 seconds; try again with a longer")
    assert time.monotonic() - began >= 1
    assert device.clock() - clock < 4
    # A late answer counts, and ends no other command.
    guest.ask(REPORTING, (PLAY, MIB, True))
    assert device.status()["reported"] >= MIB
    with report(device, "--json") as process:
        newer = guest.commanded()
        guest.done(number)
        assert process.poll() is None and device.status()["report"]["running"]
        guest.done(newer)
        assert result(process)["reported"] == 0


def stop_reporting(guest: Guest) -> None:
    guest.stop_ring(REPORTING)


def disable_reporting(guest: Guest) -> None:
    assert guest.accepted("SET_VRING_ENABLE", words(REPORTING, 0))


def reset(guest: Guest) -> None:
    assert guest.accepted("RESET_DEVICE")


def another_driver(guest: Guest) -> None:
    features = struct.pack("=Q", ALL | 1 << 30 | 1 << 32)
    assert guest.accepted("SET_FEATURES", features)


def hang_up(guest: Guest) -> None:
    guest.close()


@pytest.mark.parametrize(
    "how",
    [stop_reporting, disable_reporting, reset, another_driver, hang_up],
    ids=lambda how: str(how.__name__),
)
def test_a_reset_meanwhile(device: Device, how: Callable[[Guest], None]) -> None:
    with Guest(device) as guest:
        guest.begin()
        with report(device, "--timeout", "60") as process:
            number = guest.commanded()
            how(guest)
            ended(process, TEMPORARY, "the guest was reset, or its driver has stopped")
        if how is not hang_up:
            assert guest.field(DONE) == number, "no command is outstanding"
            guest.done(number)
    # The next guest answers the next command only.
    with Guest(device) as guest:
        guest.begin()
        assert guest.field(CMD) == guest.field(DONE)
        with report(device, "--json") as process:
            guest.done(guest.commanded())
            assert result(process)["reported"] == 0


def test_a_client_that_goes(guest: Guest) -> None:
    with report(guest.device) as process:
        number = guest.commanded()
        process.kill()
    assert guest.device.status()["report"]["running"]
    guest.done(number)
    assert eventually(lambda: not guest.device.status()["report"]["running"])


def test_a_driver_that_writes_numbers_by_itself(guest: Guest) -> None:
    for number in (0, 1, 2**32 - 1):
        guest.done(number)
    assert not guest.device.status()["report"]["running"]
    with report(guest.device, "--json") as process:
        number = guest.commanded()
        for other in (0, number - 1, number + 1, 2**32 - 1):
            guest.done(other)
        assert process.poll() is None
        guest.done(number)
        assert result(process)["reported"] == 0


@pytest.mark.parametrize("timeout", [0, 3601, 2**64 - 1])
def test_time_outs_that_are_none(guest: Guest, timeout: int) -> None:
    with report(guest.device, "--timeout", str(timeout)) as process:
        _, error = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2 and f"'{timeout}' for '--timeout <SECONDS>'" in error
    answer = guest.device.ask(command="report", timeout=timeout)
    assert not answer["ok"]
    assert f"cannot wait {timeout} seconds for a report: a time-out is 1 to 3600" in answer["error"]
    assert answer["error"].endswith("; give another one")
    assert guest.field(CMD) == guest.field(DONE) == 0


def test_control_requests(guest: Guest) -> None:
    for request in ({"timeout": -1}, {"timeout": "1"}, {"seconds": 1}):
        answer = guest.device.ask(command="report", **request)
        assert not answer["ok"] and "cannot read the request" in answer["error"]
    assert guest.field(CMD) == 0
    guest.device.ask(command="discard", enabled=False)
    answer = guest.device.ask(command="report")
    assert (answer["ok"], answer["reason"], answer["retry"]) == (False, "suspended", True)
    guest.device.ask(command="discard", enabled=True)


def test_the_state_file_stays(start: Start, tmp_path: Path) -> None:
    state = tmp_path / "state"
    device = start("--state", str(state))
    device.ask(command="target", bytes=0)
    before = state.read_bytes()
    with Guest(device) as guest:
        guest.begin()
        with report(device) as process:
            guest.done(guest.commanded())
            assert process.wait(PATIENCE) == 0
    assert state.read_bytes() == before
