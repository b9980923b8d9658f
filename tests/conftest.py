# SPDX-License-Identifier: GPL-2.0
"""What all tests share.

Images by name, and an exit code that tells a broken machine from a failure.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from lab.boot import guest as guests
from lab.boot.spec import BootSpec
from lab.boot.verdict import EmulatorFault
from lab.build import daemon as daemons
from lab.build import linux as build
from lab.build import qemu as qemus
from lab.build.qemu import build_qemu
from lab.core import host
from lab.core.errors import MACHINE, LabError
from lab.core.progress import duration
from lab.machine import apt, arches, fetch
from lab.testing import suite as testing
from tests.guest.guests import OutOfLuck

host.settle()
# A busy machine is no failure.
hypothesis.settings.register_profile(
    "lab", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("lab")
# In the background of a shell it is ignored, and would be by what the tests start to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTED_AGAIN = guests.started_again  # of real guests: tests that play them use a list of their own
_states: dict[str, int] = {"failed": 0, "machine": 0}
ATTEMPTS = 5  # of a test that fell short of an amount; pyproject.toml has more, for the emulator
EMULATOR_FAULTS = 2  # in one test


class Unreliable(AssertionError):
    """A test falls short of an amount, or meets a fault of the emulator, more often than it may."""


# How many attempts of a test failed and passed, and the share that may fail.
_tries = pytest.StashKey[dict[str, float]]()


@pytest.fixture(scope="session")
def image() -> Callable[..., Path]:
    """``image("debug")``: a kernel by the name of its variant, built when needed."""
    return lambda *which, **more: build.build_linux(*which, **more)


@pytest.fixture(autouse=True)
def no_kernel_but_those_that_are_prepared(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty cache, a test would build a kernel beside the other tests, and be late."""
    if request.node.get_closest_marker("nightly"):
        return
    really = build.build_linux

    def build_linux(
        variant: str, arch: str = "x86_64", config: str = "", chosen: build.Chosen = ()
    ) -> Path:
        if (
            variant in build.VARIANTS
            and arch in arches.EACH
            and (variant, arch) not in testing.KERNELS
        ):
            pytest.fail(
                f"`kz test` does not build {variant} for {arch} (KERNELS in lab/testing/suite.py)"
            )
        return really(variant, arch, config, chosen)

    monkeypatch.setattr(build, "build_linux", build_linux)


# One start of an emulated guest in some hundreds hangs. So many in a run have another cause.
TOO_OFTEN = 10

# Where a build or a download begins.
BEGINNINGS = (
    (apt.PrivateApt, "download"),
    (apt.PrivateApt, "download_with_dependencies"),
    (build, "make_targets"),
    (qemus, "make_qemu"),
    (daemons, "cargo"),
)


@pytest.fixture(autouse=True)
def no_build_without_a_mark(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``kz test --quick`` runs tests that neither build nor download.

    The others have one of these marks.
    """
    marks = ("boots", "slow", "nightly", "images")
    if any(request.node.get_closest_marker(name) for name in marks):
        return

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("this test builds or downloads something: mark it with `images`")

    monkeypatch.setattr(apt, "may_install", lambda: None)
    for place, name in BEGINNINGS:
        monkeypatch.setattr(place, name, refuse)


@pytest.fixture(scope="session")
def qemu() -> Path:
    """Our QEMU."""
    return build_qemu("knownzero")


@pytest.fixture
def newer_qemu(monkeypatch: pytest.MonkeyPatch) -> None:
    """QEMU 10.2 as the source in use."""
    monkeypatch.setenv(fetch.variable("qemu"), "")
    fetch.use("qemu", "10.2")


@pytest.fixture
def boot() -> Callable[[BootSpec], guests.BootResult]:
    """Boot a guest and run its command to the end."""
    return guests.boot


# Tests that take more than half a minute by day: they begin first, or one worker would end alone.
LONGEST = (
    "test_the_packaged_qemu",
    "test_series_is_in_order",
    "test_stock_qemu_with_a_correct_daemon_and_false_ones",
    "test_qtest",
    "test_debians_qemu_with_the_daemon",
    "test_a_sandbox_is_parked_and_restored",
    "test_suspended_while_it_runs",
    "test_no_byte_leaks",
    "test_a_device_that_refuses_at_random",
    "test_no_task_waits_for_it",
    "test_plain_git_am",
    "test_the_selftest",
    "test_every_way_to_get_them",
    "test_its_own_tests",
)


def _turn(item: pytest.Item) -> int:
    """The turn of a test: the longest first, then guests, then the others."""
    name = getattr(item, "originalname", item.name)
    if name in LONGEST:
        return LONGEST.index(name)
    return len(LONGEST) + (item.get_closest_marker("boots") is None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, unless $KNOWNZERO_NIGHTLY asks for it."""
    if os.environ.get("KNOWNZERO_NIGHTLY"):
        return
    late = [item for item in items if item.get_closest_marker("nightly")]
    if late:
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    items.sort(key=_turn)


def _sentence(item: pytest.Item) -> str:
    """The first sentence about a test; empty for a test without a docstring."""
    return (
        (getattr(getattr(item, "function", None), "__doc__", "") or "").strip().partition("\n")[0]
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Count the attempts of a test that fell short of an amount: it may do so in a share of them.

    Faults of the emulator are counted apart.
    An attempt that passes is followed by another one while the share is too large. A test that
    could not meet it within ATTEMPTS has failed.
    """
    nothing = {"failed": 0, "passed": 0, "most": 0.0, "emulator": 0}
    tries = item.stash.setdefault(_tries, nothing)
    try:
        result = yield
    except EmulatorFault as fault:
        tries["emulator"] += 1
        if tries["emulator"] > EMULATOR_FAULTS:
            raise Unreliable(f"{fault}: in {tries['emulator']:.0f} attempts") from fault
        raise
    except OutOfLuck as luck:
        tries["failed"] += 1
        tries["most"] = luck.often
        made = tries["failed"] + tries["passed"]
        if tries["failed"] > ATTEMPTS * luck.often:
            raise Unreliable(
                f"{luck}: failed in {tries['failed']:.0f} of {made:.0f} attempts, and may in "
                f"{luck.often:.0%} of {ATTEMPTS}"
            ) from luck
        raise
    if tries["failed"]:
        tries["passed"] += 1
        wanted = round(tries["failed"] / tries["most"] - tries["failed"])
        if tries["passed"] < wanted:
            raise OutOfLuck(f"passed {tries['passed']:.0f} of {wanted} times after a failure")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, LabError):
        error = call.excinfo.value
        report.longrepr = f"{error}\n(in {item.nodeid})"
        if error.code == MACHINE:
            report.user_properties.append(("machine", "broken"))
    if report.skipped and not hasattr(report, "wasxfail"):
        report.user_properties.append(("not_tested", _sentence(item)))
    if STARTED_AGAIN:
        report.user_properties.append(("started_again", "\n".join(STARTED_AGAIN)))
        STARTED_AGAIN.clear()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _states["failed"] += 1
        if ("machine", "broken") in report.user_properties:
            _states["machine"] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skipped tests, leak hunts (``hunted`` in tests/guest/guests.py), and guests that were started
    twice.
    """
    if skipped := terminalreporter.stats.get("skipped", []):
        terminalreporter.section(f"not tested on this machine: {len(skipped)}")
    for report in skipped:
        sentence = dict(report.user_properties).get("not_tested", "")
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        about = f" ({sentence})" if sentence else ""
        terminalreporter.write_line(f"{report.nodeid}{about}: {reason.removeprefix('Skipped: ')}")
    found = {"hunted_ms": 0, "pages_hunted": 0, "skips_checked": 0}
    hunts = 0
    # Teardown is not among these: each test counts once.
    for report in terminalreporter.getreports("passed"):
        told = dict(report.user_properties)
        hunts += "skips_checked" in told
        for name in found:
            found[name] += told.get(name, 0)
    for nodeid, text in _started_again(terminalreporter):
        terminalreporter.write_line(f"started again, {nodeid}: {text}")
    if hunts:
        terminalreporter.write_line(
            f"{hunts} leak hunts, {duration(found['hunted_ms'] / 1000)}: "
            f"{found['pages_hunted'] / 1e6:.2f} million pages read by the hunter, "
            f"{found['skips_checked'] / 1e6:.2f} million that were not zeroed and checked"
        )


def _started_again(terminalreporter: pytest.TerminalReporter) -> list[tuple[str, str]]:
    return [
        (report.nodeid, text)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, text in getattr(report, "user_properties", ())
        if name == "started_again"
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and len(again := _started_again(reporter)) > TOO_OFTEN:
        reporter.write_line(f"{len(again)} guests were started again: more than {TOO_OFTEN}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    # Every failure has the same cause, and it is not what was tested.
    if _states["failed"] and _states["failed"] == _states["machine"]:
        session.exitstatus = MACHINE
