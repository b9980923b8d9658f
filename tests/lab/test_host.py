# SPDX-License-Identifier: GPL-2.0
"""The lab works the same whatever is installed and configured on the machine."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lab.core import host
from lab.core.paths import REPO
from lab.machine import stock

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
