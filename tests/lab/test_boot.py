# SPDX-License-Identifier: GPL-2.0
"""What a guest reports is read rightly, however it ends; a stand-in plays QEMU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.boot import guest as boot
from lab.boot import initramfs
from lab.boot.spec import BootSpec
from lab.core import errors, paths
from lab.core.errors import TestFailure
from tests.lab.test_console import ASSERTED, NO_PORT, RACE

# Plays QEMU: finds the channels by name in its arguments, then does what its script says.
FAKE = """#!/usr/bin/env python3
import os, re, signal, sys, time
words = " ".join(sys.argv[1:])
fd = {name: int(n) for name, n in re.findall(r"socket,id=kz(\\w+),fd=(\\d+)", words)}
console = open(re.search(r"file,id=kzconsole,path=(\\S+)", words)[1], "w", buffering=1)
def tell(name, data):
    os.write(fd[name], data if isinstance(data, bytes) else data.encode())
def report(code=0, taint=0):
    tell("ctl", f"taint {taint}\\nexit {code}\\n")
def once(name):
    try:
        os.remove(os.path.join(os.path.dirname(__file__), name))
    except FileNotFoundError:
        return False
    return True
if once("hang"):
    time.sleep(10_000)
if once("die"):
    with open(os.path.join(os.path.dirname(__file__), "last words")) as words:
        console.write(words.read())
    sys.exit(0)
if once("abort"):
    with open(os.path.join(os.path.dirname(__file__), "last words")) as words:
        print(words.read(), file=sys.stderr, flush=True)
    print("pci 0000:00:00.0: conventional PCI endpoint", file=console)
    os.abort()
tell("ctl", "ready 0\\n")
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BootSpec]:
    """Makes a BootSpec whose QEMU runs the given Python lines."""
    monkeypatch.setattr(paths, "REPO", tmp_path / "repo")
    monkeypatch.setattr(boot, "started_again", [])
    (tmp_path / "repo").mkdir()
    monkeypatch.setattr(initramfs, "write", lambda target, *_, **__: target.write_bytes(b""))
    monkeypatch.setattr(initramfs, "base_archive", lambda arch: tmp_path / "archive")
    (tmp_path / "kernel").write_bytes(b"\x7fELF")

    def make(script: str, **more: object) -> BootSpec:
        program = tmp_path / "qemu"
        program.write_text(FAKE + script)
        program.chmod(0o755)
        fields = {
            "kernel": tmp_path / "kernel",
            "qemu": program,
            "accel": "tcg",
            "timeout": 300.0,
            "command": ["true"],
            **more,
        }
        return BootSpec(**fields)  # type: ignore[arg-type]

    return make


@pytest.fixture
def last_words(tmp_path: Path) -> Path:
    """What a guest, or its QEMU, says that is to die early."""
    file = tmp_path / "last words"
    file.write_text(RACE)
    return file


Fake = Callable[..., BootSpec]


def test_output_and_exit_code_pass_through(fake: Fake) -> None:
    out = bytearray()
    script = 'tell("out", b"a\\x00\\xff\\r\\nb"); tell("err", "oh\\n"); report(7)'
    result = boot.boot(fake(script), out.extend)
    assert out == b"a\x00\xff\r\nb"
    assert (result.stderr, result.exit_code, result.violations) == ("oh\n", 7, [])


@pytest.mark.parametrize("code", [0, 1, 2, 3, 126, 127, 128, 137, 255])
def test_every_exit_code(code: int, fake: Fake) -> None:
    assert boot.boot(fake(f"report({code})")).exit_code == code


def test_output_of_any_size_is_whole(fake: Fake) -> None:
    out = bytearray()
    boot.boot(
        fake(
            'data = bytes(range(256)) * 20000\nwhile data:\n    data = data[os.write(fd["out"], '
            "data[:65536]):]\nreport()"
        ),
        out.extend,
    )
    assert out == bytes(range(256)) * 20000


def test_a_trailer_in_the_output_is_output(fake: Fake) -> None:
    result = boot.boot(fake('tell("out", "exit 0\\n"); report(4)'))
    assert (result.stdout, result.exit_code) == ("exit 0\n", 4)


def test_a_guest_that_dies_before_it_reports(fake: Fake) -> None:
    with pytest.raises(TestFailure, match="died before") as caught:
        boot.boot(
            fake('print("Kernel panic - not syncing: oh", file=console); tell("ctl", "exit")')
        )
    assert caught.value.code == errors.FAILED
    assert "Kernel panic" in caught.value.why
    assert "console.log" in caught.value.why
    assert not boot.started_again


def test_a_guest_that_hangs_is_ended_and_quoted(fake: Fake) -> None:
    with pytest.raises(TestFailure, match="did not finish within 10 s") as caught:
        boot.boot(fake('print("last words", file=console); time.sleep(10_000)', timeout=10.0))
    assert "last words" in caught.value.why


def test_a_guest_that_does_not_switch_off_is_ended(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot, "LAST_WORDS", 0.5)
    assert (
        boot.boot(
            fake("report(3); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(10_000)")
        ).exit_code
        == 3
    )


def test_a_fault_fails_the_run_in_spite_of_exit_code_0(fake: Fake) -> None:
    script = 'print("[    1.0] WARNING: CPU: 0 PID: 1 at mm/x.c:1", file=console); report(0)'
    with pytest.raises(TestFailure, match="reported a fault") as caught:
        boot.boot(fake(script))
    assert "WARNING: CPU: 0" in caught.value.why
    result = boot.boot(fake(script, allow_warnings=True))
    assert (result.exit_code, len(result.violations)) == (0, 1)


def test_a_taint_is_a_fault_even_if_the_console_lost_it(fake: Fake) -> None:
    with pytest.raises(TestFailure, match="reported a fault"):
        boot.boot(fake("report(0, taint=1 << 9)"))


@pytest.mark.usefixtures("last_words")
@pytest.mark.parametrize("how", ["hang", "die"])
def test_an_emulated_guest_that_never_came_up_is_started_again(
    fake: Fake, tmp_path: Path, how: str
) -> None:
    (tmp_path / how).touch()
    assert boot.boot(fake("report(7)", timeout=15.0)).exit_code == 7
    assert not (tmp_path / how).exists()
    (why,) = boot.started_again
    assert "console.log" in why
    assert how == "hang" or "mp_irqdomain_alloc" in why


@pytest.mark.usefixtures("last_words")
@pytest.mark.parametrize("how", ["hang", "die"])
def test_a_running_guest_that_never_came_up_is_started_again(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / how).touch()
    # Long enough for a busy machine to start what plays the guest.
    monkeypatch.setattr(boot, "COMES_UP", 15.0)
    with boot.running(fake("report(7)")) as guest:
        assert guest.wait().exit_code == 7
    assert not (tmp_path / how).exists()
    assert len(boot.started_again) == 1


@pytest.mark.parametrize(
    ("said", "cpus", "forgiven"),
    [
        (ASSERTED, 2, True),
        (ASSERTED, 1, False),
        (ASSERTED.replace("pci/msix.c", "virtio/virtio-balloon.c"), 2, False),
    ],
)
def test_an_emulator_that_dies_early_is_forgiven_for_what_is_known(
    fake: Fake, tmp_path: Path, last_words: Path, said: str, cpus: int, forgiven: bool
) -> None:
    last_words.write_text(said)
    spec = fake("report(7)", cpus=cpus)

    def booted() -> int:
        return boot.boot(spec).exit_code

    def ran() -> int:
        with boot.running(spec) as guest:
            return guest.wait().exit_code

    for how in (booted, ran):
        (tmp_path / "abort").touch()
        if forgiven:
            assert how() == 7
        else:
            with pytest.raises(TestFailure, match="died before") as caught:
                how()
            assert said in caught.value.why
    assert [said in why for why in boot.started_again] == ([True, True] if forgiven else [])


@pytest.mark.parametrize(
    ("cpus", "before", "forgiven"),
    [(2, "", True), (1, "", False), (2, "page_zeroed: BUG: page 0x1 is not zero\n", False)],
)
def test_a_guest_that_got_no_ports_is_started_again(
    fake: Fake, tmp_path: Path, last_words: Path, cpus: int, before: str, forgiven: bool
) -> None:
    """It powers off, with QEMU's exit code 0."""
    last_words.write_text(f"{before}{NO_PORT}\n[   14.6] reboot: Power down\n")
    (tmp_path / "die").touch()
    spec = fake("report(7)", cpus=cpus)
    if forgiven:
        assert boot.boot(spec).exit_code == 7
        (why,) = boot.started_again
        assert "no channel kz.ctl" in why
    else:
        with pytest.raises(TestFailure, match="died before"):
            boot.boot(spec)
        assert not boot.started_again


@pytest.mark.parametrize("why", ["page_zeroed: BUG: page 0x1 is not zero", "Oops: 0000 [#1] SMP"])
def test_whatever_else_kills_a_guest_early_fails(
    fake: Fake, tmp_path: Path, last_words: Path, why: str
) -> None:
    last_words.write_text(f"{why}\nKernel panic - not syncing: oh\n")
    (tmp_path / "die").touch()
    with pytest.raises(TestFailure, match="died before") as caught:
        boot.boot(fake("report(7)"))
    assert why in caught.value.why
    (tmp_path / "die").touch()
    with (
        pytest.raises(TestFailure, match=r"died before|reported a fault"),
        boot.running(fake("report(7)")) as guest,
    ):
        guest.wait()
    assert not boot.started_again


@pytest.mark.usefixtures("last_words")
def test_a_guest_that_always_dies_early_fails(fake: Fake) -> None:
    spec = fake("")
    program = Path(str(spec.qemu))
    program.write_text(program.read_text().replace('if once("die"):', "if True:"))
    with pytest.raises(TestFailure, match="died before") as caught:
        boot.boot(spec)
    assert "mp_irqdomain_alloc" in caught.value.why
    assert len(boot.started_again) == 1


def test_a_guest_that_is_not_to_start_is_not_waited_for(fake: Fake) -> None:
    spec = fake("time.sleep(10_000)", timeout=10_000.0)
    spec.extra_qemu = ["-S"]
    with boot.running(spec) as guest:
        assert guest.process.poll() is None


def test_talking_to_a_running_guest(fake: Fake) -> None:
    script = (
        'stream = os.fdopen(fd["in"], "r")\n'
        'for line in stream:\n    tell("out", "got " + line)\n    if line == "end\\n": break\n'
        "report(5)"
    )
    with boot.running(fake(script)) as guest:
        lines = guest.lines
        guest.send("one")
        assert next(lines) == "got one"
        guest.send("end")
        assert list(lines) == ["got end"]
        assert guest.wait().exit_code == 5


def test_a_guest_dies_with_a_lab_that_is_killed() -> None:
    script = (
        "import subprocess; from lab.core import run; child = subprocess.Popen(['sleep', '100'], "
        "preexec_fn=run.die_with_parent); print(child.pid, flush=True); child.wait()"
    )
    lab = subprocess.Popen(
        [sys.executable, "-c", script], cwd=paths.REPO, stdout=subprocess.PIPE, text=True
    )
    assert lab.stdout
    pid = int(lab.stdout.readline())
    lab.kill()
    lab.wait()
    lab.stdout.close()
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    pytest.fail("it was left behind")


def test_a_running_guest_that_is_left_is_ended(fake: Fake) -> None:
    with boot.running(fake("time.sleep(100)", timeout=60.0)) as guest:
        assert guest.process.poll() is None
    assert guest.process.poll() is not None


@pytest.mark.parametrize("then", ["time.sleep(100)", ""], ids=["runs", "has ended"])
def test_a_guest_that_is_left_is_judged(fake: Fake, then: str) -> None:
    script = f'print("BUG: Bad page state", file=console); tell("out", "go\\n"); {then}'
    with (
        pytest.raises(TestFailure, match="reported a fault"),
        boot.running(fake(script, timeout=60.0)) as guest,
    ):
        assert next(guest.lines) == "go"
        if not then:
            guest.process.wait(60)


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(
            ["ready 0", "taint 512", "exit 3", "exit x", "", "exit 3 4", "noise", "exit -1"]
        )
    ),
    st.integers(1, 7),
)
def test_reports_are_read_whatever_their_pieces(lines: list[str], size: int) -> None:
    guest = boot.Guest.__new__(boot.Guest)
    guest._control, guest._exit, guest._taint, guest._ready = b"", None, 0, threading.Event()
    data = "".join(f"{line}\n" for line in lines).encode()
    for start in range(0, len(data), size):
        guest._take("ctl", data[start : start + size])
    codes = [int(line.split()[1]) for line in lines if line in ("exit 3", "exit -1")]
    assert guest._exit == (codes[-1] if codes else None)
    assert guest._ready.is_set() == ("ready 0" in lines)
