# SPDX-License-Identifier: GPL-2.0
"""Every set of parts applies with plain ``git am``; each part alone builds, boots and passes its KUnit tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lab.boot.guest import boot
from lab.boot.spec import BootSpec
from lab.build.linux import build_linux
from lab.machine import fetch
from lab.series import parts
from lab.testing import kunit
from lab.testing.suite import PART_SETS

SETS = {name: parts.sets(parts.get(name)) for name in ("linux", "qemu")}
ALL = [pytest.param(name, chosen, id=f"{name}-{'+'.join(chosen)}") for name in SETS for chosen in SETS[name]]
NIGHT_SETS = [one for one in SETS["linux"] if one not in PART_SETS and len(one) > 2]


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Git as a newcomer has it: no configuration but a name."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    argv = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(folder), *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plain git repositories with the files of the base that any patch changes."""
    found = {}
    for name in SETS:
        pristine = fetch.pristine(fetch.obtain(name))
        folder = found[name] = tmp_path_factory.mktemp(name)
        for file in parts.get(name).files():
            if (pristine / file).is_file():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(pristine / file, folder / file)
        for arguments in (["init", "-q"], ["add", "-f", "."], ["commit", "-qm", "base"], ["tag", "base"]):
            assert git(folder, *arguments).returncode == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chosen"), ALL)
def test_plain_git_am(name: str, chosen: tuple[str, ...], plain: dict[str, Path]) -> None:
    folder = plain[name]
    assert git(folder, "checkout", "-q", "--detach", "-f", "base").returncode == 0
    done = git(folder, "am", "-q", *[str(patch) for patch in parts.get(name, chosen).patches()])
    if done.returncode:
        git(folder, "am", "--abort")
    assert done.returncode == 0, done.stderr


@pytest.mark.boots
@pytest.mark.parametrize("chosen", PART_SETS, ids="+".join)
def test_a_set_of_parts_boots(chosen: tuple[str, ...]) -> None:
    image = build_linux("debug", "um", chosen=chosen)
    done = boot(BootSpec(kernel=image, arch="um", memory="512M", command=["cat", "/proc/vmstat"]))
    assert done.exit_code == 0 and not done.violations
    assert ("pgzeroed_bad" in done.stdout) == ("zeroed" in chosen)


@pytest.mark.boots
def test_the_part_zeroed_passes_its_unit_tests_alone() -> None:
    cases = kunit.run("um", "page_zeroed*", build_linux("debug", "um", chosen=PART_SETS[-1]))
    assert cases and all(case.state != "failed" for case in cases), cases


@pytest.mark.nightly
@pytest.mark.matrix
@pytest.mark.boots
@pytest.mark.parametrize("variant", ["debug", "knownzero", "off"])
@pytest.mark.parametrize("chosen", NIGHT_SETS, ids="+".join)
def test_every_set_of_parts_boots(chosen: tuple[str, ...], variant: str) -> None:
    image = build_linux(variant, "um", chosen=chosen)
    done = boot(BootSpec(kernel=image, arch="um", memory="512M", command=["true"]))
    assert done.exit_code == 0 and not done.violations
