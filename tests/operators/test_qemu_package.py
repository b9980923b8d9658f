# SPDX-License-Identifier: GPL-2.0
"""The package of QEMU.

Beside the distribution's, removed without a trace, and what it lacks is documented.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from lab.build import package
from lab.build.qemu import build_qemu
from lab.core import run
from lab.core.paths import REPO
from lab.machine import fetch, stock
from tests.operators.hosts import need_root

FEATURES = REPO / "packaging" / "qemu" / "features.toml"
PAGE = REPO / "docs" / "how-to" / "operate.md"
# In a copy-on-write view of the machine: install a package, run it, remove it; the paths that have
# changed by then. dpkg rewrites its own records; what they say of the package is checked by name.
INSTALLED = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs $1
for folder in usr etc var; do
    mkdir $1/$folder $1/$folder.work
    layers=lowerdir=/$folder,upperdir=$1/$folder,workdir=$1/$folder.work
    mount -t overlay overlay -o $layers /$folder
done
mkdir -p /usr/bin
echo distribution > /usr/bin/qemu-system-x86_64
dpkg --install --force-depends $2 > $1/log 2>&1
qemu-system-x86_64-knownzero --version
dpkg --verify qemu-knownzero
cat /usr/bin/qemu-system-x86_64
dpkg --purge --force-depends qemu-knownzero >> $1/log 2>&1
rm /usr/bin/qemu-system-x86_64
cd $1
find usr etc var ! -type d ! -type c ! -path 'var/lib/dpkg/*' \\
    ! -path 'var/log/*' ! -path 'var/cache/*'
find /usr /etc /var/lib/dpkg/info -name '*qemu*knownzero*'
grep -A 1 'Package: qemu-knownzero' /var/lib/dpkg/status || true
"""


def left_out() -> list[dict[str, object]]:
    found: list[dict[str, object]] = tomllib.loads(FEATURES.read_text(encoding="utf-8"))["left-out"]
    return found


def removed_without_a_trace(tmp_path: Path) -> str:
    """Install the package, run QEMU, and remove it; the version that QEMU prints."""
    need_root("cannot install a package")
    made = package.package_qemu(tmp_path)
    view = tmp_path / "view"
    view.mkdir()
    script = ["unshare", "--mount", "sh", "-c", INSTALLED, "sh", str(view), str(made)]
    shown = run.output(
        script, "the package cannot be installed and removed", "run the script by hand"
    )
    version, *rest = shown.splitlines()
    assert rest[1:] == ["distribution"], shown
    return version


@pytest.mark.nightly
@pytest.mark.slow
def test_removal_leaves_no_file(tmp_path: Path) -> None:
    assert removed_without_a_trace(tmp_path).startswith("QEMU emulator version 10.0.")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("newer_qemu")
def test_removal_of_the_newer_one_leaves_no_file(tmp_path: Path) -> None:
    assert removed_without_a_trace(tmp_path).startswith("QEMU emulator version 10.2.")


@pytest.mark.nightly
@pytest.mark.slow
def test_it_has_no_file_of_debians_qemu(tmp_path: Path) -> None:
    listing = run.output(
        ["dpkg-deb", "-c", str(package.package_qemu(tmp_path))], "no list", "make it again"
    )
    ours = {
        line.split(" -> ")[0].split()[-1].rstrip("/")
        for line in listing.splitlines()
        if line[0] != "d"
    }
    assert "./usr/bin/qemu-system-x86_64-knownzero" in ours
    assert all("knownzero" in path for path in ours)


def test_the_page_has_the_table() -> None:
    rows = "".join(f"| {one['what']} | {one['why']} |\n" for one in left_out())
    assert rows in PAGE.read_text(encoding="utf-8"), rows


def names(program: Path, option: str) -> set[str]:
    done = subprocess.run([program, option, "help"], capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if option == "-device":
        return set(re.findall(r'^name "([^"]+)"', text, re.MULTILINE))
    # A heading, then a name in each line.
    return {line.split()[0] for line in text.splitlines()[1:] if line.strip()}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "option", ["-device", "-netdev", "-object", "-chardev", "-display", "-machine", "-tpmdev"]
)
def test_all_that_debian_has_more_is_in_the_table(option: str) -> None:
    debian = stock.qemu(suite=fetch.base("qemu").suite)
    known = {str(name) for one in left_out() for name in one["names"]}  # type: ignore[attr-defined]
    theirs, ours = names(debian, option), names(build_qemu("knownzero"), option)
    assert theirs & ours
    assert {
        name for name in theirs - ours if not any(fnmatch.fnmatch(name, one) for one in known)
    } == set()
