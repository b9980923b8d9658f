# SPDX-License-Identifier: GPL-2.0
"""The lab works the same whatever is installed and configured on the machine."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lab.boot import argv, doctor, guest
from lab.boot.argv import Ends, Images
from lab.boot.spec import BootSpec
from lab.core import host, paths
from lab.core.paths import REPO
from lab.machine import debs, others, stock

MODULES = "usr/lib/x86_64-linux-gnu"
# Mounts $1/DIR over /DIR for the rest of its words; $1 has a folder for each.
OVER = """
root=$1; shift
for dir in usr/lib/x86_64-linux-gnu usr/share etc; do
    mount -t overlay -o "lowerdir=$root/$dir:/$dir" overlay "/$dir" || exit 77
done
exec "$@"
"""


@pytest.fixture
def operators_machine(tmp_path: Path) -> list[str]:
    """The words that run a command on a machine with another QEMU.

    Its modules, firmware and configuration.
    """
    root = tmp_path / "machine"
    for folder in (f"{MODULES}/qemu", "usr/share/qemu", "usr/share/seabios", "etc/qemu"):
        (root / folder).mkdir(parents=True)
    for module in (
        "ui-opengl",
        "hw-display-virtio-gpu",
        "hw-display-virtio-gpu-pci-gl",
        "audio-pa",
    ):
        file = root / MODULES / "qemu" / f"{module}.so"
        subprocess.run(["cc", "-shared", "-o", file, "-x", "c", os.devnull], check=True)
    (root / "usr/share/seabios/bios-256k.bin").write_bytes(b"")
    (root / "etc/qemu/qemu.conf").write_text("[nonsense]\n  a = b\n")
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", OVER, "sh", str(root)]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a user cannot mount an overlay here")
    return words


@pytest.mark.images
def test_stock_qemu_takes_nothing_of_the_machines_qemu(operators_machine: list[str]) -> None:
    """It searches the modules of /usr after $QEMU_MODULE_DIR, and stops at one of another build."""
    qemu = stock.qemu()
    for words in (
        ["-device", "help"],
        ["-L", "help"],
        ["-device", "vhost-user-test-device-pci,help"],
    ):
        done = subprocess.run(
            [*operators_machine, str(qemu), *words], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        if words[0] == "-L":
            assert all(line.startswith(str(qemu.parent)) for line in done.stdout.splitlines())


@pytest.mark.images
def test_doctor_names_a_stock_qemu_that_does_not_run(
    operators_machine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qemu = stock.qemu()
    assert doctor._try("qemu", "missing", doctor._stock_qemu).state == "ok"
    # As it was: without the folder that replaces /usr.
    bare = tmp_path / "qemu"
    words = [
        *operators_machine,
        *debs.loader(qemu.parent),
        str(qemu.parent / "usr/bin" / qemu.name),
    ]
    bare.write_text(f'#!/bin/sh\nunset DISPLAY\nexec {shlex.join(words)} "$@"\n')
    bare.chmod(0o755)
    bundle = next(qemu.parent.rglob("qemu-bundle"))
    bundle.rename(bundle.with_name("away"))
    try:
        monkeypatch.setattr(stock, "find_qemu", lambda: bare)
        found = doctor._try("qemu", "missing", doctor._stock_qemu)
    finally:
        bundle.with_name("away").rename(bundle)
    assert found.state == "missing"
    assert found.fix.startswith("remove ")


STEERED = {
    "ARCH": "arm64",
    "MAKEFLAGS": "-j99",
    "CFLAGS": "-O0",
    "CCACHE_DISABLE": "1",
    "GIT_DIR": "/nonexistent",
    "TAR_OPTIONS": "--nonsense",
    "QEMU_MODULE_DIR": "/nonexistent",
    "LD_PRELOAD": "",
}


def test_settings_of_the_user_do_not_reach_programs(tmp_path: Path) -> None:
    """Packages need the modes of their files, and messages that are read have to be English."""
    script = (
        "import os; from lab.core import host; host.settle(); open('f', 'w').close(); "
        "os.execvp('env', ['env'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ
        | STEERED
        | {"LANG": "de_DE.UTF-8", "LC_MESSAGES": "de_DE", "PYTHONPATH": str(REPO)},
        umask=0o077,
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert {*STEERED, "LANG", "LC_MESSAGES"}.isdisjoint(found)
    assert found["LC_ALL"] == host.LOCALE
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o644


def test_every_verb_settles_first(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab", "doctor"],
        env={
            **os.environ,
            "PYTHONPATH": str(REPO),
            "CCACHE_DISABLE": "1",
            "KNOWNZERO_CACHE": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "without effect in the lab: CCACHE_DISABLE" in done.stdout, done.stderr


SWAPS = "Filename Type Size Used Priority\n/swap\\040file file 4194304 1048576 -2\n"


@pytest.mark.parametrize(("swaps", "state"), [(SWAPS, "note"), ("Filename\n", "ok")])
def test_doctor_names_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: str, state: str
) -> None:
    (tmp_path / "swaps").write_text(swaps)
    monkeypatch.setattr(others, "PROC", tmp_path)
    found = doctor._swap()
    assert found.state == state
    if state == "note":
        assert found.text.startswith("/swap\\040file: 1.0 of 4.0 GiB in use")
        assert found.fix.endswith("swapoff --all")


@pytest.mark.parametrize(("have", "free", "state"), [(8, 5, "note"), (8, 8, "ok"), (-1, 0, "ok")])
def test_doctor_names_huge_pages_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, have: int, free: int, state: str
) -> None:
    monkeypatch.setattr(others, "POOL", tmp_path if have >= 0 else tmp_path / "nothing")
    (tmp_path / "nr_hugepages").write_text(f"{have}\n")
    (tmp_path / "free_hugepages").write_text(f"{free}\n")
    found = doctor._huge_pages()
    assert found.state == state
    assert found.text.startswith(f"{max(have - free, 0)} of {max(have, 0)} in use")


def test_doctor_names_another_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = [tmp_path / "lock-frontend", tmp_path / "absent"]
    monkeypatch.setattr(others, "LOCKS", locks)
    script = (
        "import fcntl, sys\nheld = open(sys.argv[1], 'w')\nfcntl.lockf(held, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    argv = [sys.executable, "-c", script, str(locks[0])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        found = doctor._package_manager()
        assert found.state == "note"
        assert f" ({process.pid}) holds {locks[0]}: " in found.text
        process.communicate()
    assert doctor._package_manager().state == "ok"


@pytest.mark.parametrize("name", ["a space", "a:colon", "a,comma"])
def test_a_cache_in_which_linux_does_not_build(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "kz"), "doctor"],
        env={**os.environ, "KNOWNZERO_CACHE": str(tmp_path / name)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()] == ["kz", "why", "fix"]
    assert "set KNOWNZERO_CACHE" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_comma_in_the_path_of_a_console(tmp_path: Path) -> None:
    images = Images(tmp_path / "kernel", "tcg", tmp_path / "qemu")
    words = argv.make(BootSpec(), images, Ends(tmp_path / "initrd", Path("/a,b/console"), {}))
    assert "file,id=kzconsole,path=/a,,b/console" in words


@pytest.mark.boots
def test_a_repository_with_a_space_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User-Mode Linux gets the words of its command line as one line."""
    monkeypatch.setattr(paths, "out", lambda: tmp_path / "with a space")
    (tmp_path / "with a space").mkdir()
    for spec in (BootSpec("off", arch="um", memory="128M"), BootSpec("knownzero", memory="256M")):
        spec.command = ["echo", "hello"]
        assert guest.boot(spec).stdout == "hello\n"
    assert not list(paths.sub("work").glob("*.cpio"))
