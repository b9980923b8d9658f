# SPDX-License-Identifier: GPL-2.0
"""The lab on a machine as operators have it.

The machine is an overlay over this one, in a mount namespace: Debian's QEMU and libvirt are
installed in it, and its user has a home with a space, umask 077 and no sudo. Another apt holds the
locks, one disk is full, and according to /proc and /sys the machine swaps and its huge pages are in
use.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.core import errors, run
from lab.core.paths import REPO

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.images,
    pytest.mark.boots,
    pytest.mark.timeout(3600),
]

PACKAGES = (
    "qemu-system-x86",
    "qemu-system-gui",
    "libvirt-daemon-system",
    "libvirt-clients",
    "python3",
    "python3-venv",
    "git",
)
UID, HOME, CACHE, SMALL = 4242, "/srv/anna b", "/var/tmp/kz-anna", "/srv/full"
# Makes the machine in $1, and stays, since the overlay ends with this namespace.
MAKE = """
set -e
mount -t tmpfs none "$1"
cd "$1"
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
for dir in dev proc sys; do mount --rbind /$dir root/$dir; done
mount -t tmpfs none root/tmp
printf 'Filename Type Size Used Priority\\n/swapfile file 8388604 1048576 -2\\n' > swaps
mount --bind swaps root/proc/swaps
mkdir pages
echo 512 > pages/nr_hugepages
echo 12 > pages/free_hugepages
! test -d root/sys/kernel/mm/hugepages || mount --bind pages \
    root/sys/kernel/mm/hugepages/hugepages-2048kB
rm -f root/usr/bin/sudo root/etc/apt/apt.conf.d/*no-recommends* root/usr/sbin/policy-rc.d
printf '#!/bin/sh\\nexit 101\\n' > root/usr/sbin/policy-rc.d
chmod 755 root/usr/sbin/policy-rc.d
chmod 1777 root/tmp
echo 'anna:x:4242:4242::/srv/anna b:/bin/sh' >> root/etc/passwd
mkdir -p 'root/srv/anna b' root/srv/full root/var/tmp/kz-anna
mount -t tmpfs -o size=16m none root/srv/full
chown 4242:4242 'root/srv/anna b' root/srv/full root/var/tmp/kz-anna
echo ready
exec sleep infinity
"""
# Another apt: it holds its locks until its input ends.
OTHER_APT = """
import fcntl, sys
held = [open(f"/var/lib/{name}", "w") for name in sys.argv[1:]]
for file in held:
    fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
LOCKS = ("dpkg/lock", "dpkg/lock-frontend", "apt/lists/lock", "apt/archives/lock")
SETTINGS = re.compile(r"(KNOWNZERO|XDG|PYTHON|VIRTUAL_ENV|PYENV|PYTEST|HOME$|PATH$|LD_)")


class Machine:
    """The machine, as its root (for words of a shell) and as its user."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MAKE, "sh"]
        self.process = subprocess.Popen(
            [*words, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=run.die_with_parent,
        )
        assert self.process.stdout
        self.made = self.process.stdout.readline() == "ready\n"

    def words(self, argv: list[str]) -> list[str]:
        return [
            "/usr/bin/nsenter",
            f"--mount=/proc/{self.process.pid}/ns/mnt",
            "/usr/sbin/chroot",
            str(self.root),
            *argv,
        ]

    def as_root(self, line: str) -> str:
        done = subprocess.run(
            self.words(["sh", "-ec", line]), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def kz(self, *arguments: str, cache: str = CACHE) -> subprocess.CompletedProcess[str]:
        """Run kz as the user, in a clone in the home with the space."""
        kept = {name: value for name, value in os.environ.items() if not SETTINGS.match(name)}
        settings = {"HOME": HOME, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        settings |= {"KNOWNZERO_CACHE": cache} if cache else {}
        line = shlex.join(["/usr/bin/python3", "./kz", *arguments])
        user = ["/usr/bin/setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        script = f"umask 077; cd '{HOME}/knownzero'; exec {line}"
        return subprocess.run(
            self.words([*user, "sh", "-c", script]),
            env=kept | settings,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if os.geteuid():
        pytest.skip("only root mounts an overlay over the whole machine")
    made = Machine(tmp_path_factory.mktemp("machine"))
    try:
        if not made.made:
            pytest.skip(f"no overlay here: {made.process.communicate()[1].strip()}")
        made.as_root(
            "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "
            f"--no-install-recommends {' '.join(PACKAGES)}"
        )
        bundle = made.root.parent / "knownzero.bundle"
        subprocess.run(["git", "-C", REPO, "bundle", "create", bundle, "HEAD"], check=True)
        clone = f"git clone -q /tmp/knownzero.bundle '{HOME}/knownzero'"
        with bundle.open("rb") as data:
            subprocess.run(
                made.words(["sh", "-c", "cat > /tmp/knownzero.bundle"]), stdin=data, check=True
            )
        made.as_root(f"umask 077; {clone}; chown -R {UID}:{UID} '{HOME}'")
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.fixture
def other_apt(machine: Machine) -> Iterator[None]:
    """Another apt, as unattended-upgrades is."""
    locks = [name for name in LOCKS if name != "apt/archives/lock"]
    argv = machine.words(["/usr/bin/python3", "-c", OTHER_APT, *locks])
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        yield
        process.communicate()


def three_parts(text: str) -> dict[str, str]:
    """The parts of the error that a run ends with."""
    found = re.search(r"(?ms)^kz: (?P<what>[^\n]+)\n  why: (?P<why>.*?)\n  fix: (?P<fix>.*)", text)
    assert found, text
    return found.groupdict()


def test_it_is_such_a_machine(machine: Machine) -> None:
    machine.as_root("qemu-system-x86_64 --version; virsh --version; ls /usr/lib/*/qemu/ui-*.so")
    machine.as_root("! command -v sudo")


def test_a_home_with_a_space_is_named(machine: Machine) -> None:
    done = machine.kz("doctor", cache="")
    assert done.returncode == errors.MACHINE
    parts = three_parts(done.stderr)
    assert HOME in parts["why"] and "set KNOWNZERO_CACHE" in parts["fix"]


def test_a_full_disk_is_named(machine: Machine) -> None:
    done = machine.kz("doctor", cache=SMALL)
    assert done.returncode == errors.MACHINE
    assert "free some space" in three_parts(done.stderr)["fix"]


@pytest.mark.usefixtures("other_apt")
def test_doctor_sees_what_is_missing(machine: Machine) -> None:
    done = machine.kz("doctor")
    lines = done.stdout.splitlines()
    assert done.returncode in (errors.OK, errors.MACHINE), done.stderr
    assert any(re.match(r"ok +python ", line) for line in lines), done.stdout + done.stderr
    assert any(re.match(r"ok +Debian mirror ", line) for line in lines)
    # Nothing is installed without sudo: the command is named.
    absent = [number for number, line in enumerate(lines) if "absent: " in line]
    assert all("fix: run: sudo apt-get install" in lines[number + 1] for number in absent)
    assert "installs them" not in done.stdout
    # Swap, huge pages, and another apt.
    for found in (
        r"note +swap +/swapfile: 1\.0 of 8\.0 GiB in use",
        r"note +huge pages +500 of 512 in use",
        r"note +apt and dpkg +python3 \(\d+\) holds /var/lib/\S*lock",
    ):
        assert re.search(rf"(?m)^{found}", done.stdout), done.stdout


@pytest.mark.usefixtures("other_apt")
def test_a_guest_on_stock_qemu_and_stock_kernel(machine: Machine) -> None:
    """Beside the QEMU of the machine, whose modules another build cannot load."""
    done = machine.kz("boot", "--qemu", "stock", "--kernel", "stock", "--", "echo", "it runs")
    assert (done.returncode, done.stdout) == (errors.OK, "it runs\n"), done.stderr


@pytest.mark.usefixtures("other_apt")
def test_quick_tests_pass(machine: Machine) -> None:
    chosen = "test_argv or test_spec or test_console or test_top or test_fetch"
    done = machine.kz("test", "--quick", "--select", chosen)
    assert done.returncode == errors.OK, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_file_that_needs_a_tool_names_the_command(machine: Machine) -> None:
    machine.as_root("mv /usr/bin/flex /usr/bin/flex.away 2> /dev/null || true")
    done = machine.kz("build", "linux", "--variant", "base")
    assert done.returncode == errors.MACHINE
    parts = three_parts(done.stderr)
    assert "flex" in parts["why"] and parts["fix"].startswith("run: sudo apt-get install")
