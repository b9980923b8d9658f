# SPDX-License-Identifier: GPL-2.0
"""Every set of parts applies with plain ``git am``.

Each part alone builds, boots and passes its KUnit tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.boot.guest import boot
from lab.boot.spec import BootSpec
from lab.build.linux import build_linux, fragments, make_linux
from lab.core import paths
from lab.machine import fetch
from lab.patches import apply, parts
from lab.series import against
from tests.kernel import kunit, unchanged
from tests.sets import sets

EVERY = [(variant, one) for one in sets(parts.get("linux")) for variant in ("off", "debug")]


def git(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Git as a newcomer has it: no configuration but a name."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    argv = [
        "git",
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.org",
        "-C",
        str(folder),
        *map(str, arguments),
    ]
    return subprocess.run(
        argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def applies_by_hand(name: str, folder: Path) -> None:
    """Every set of parts, from a folder of this repository to a git tree of the base, without the
    lab.
    """
    series, pristine = parts.get(name), fetch.pristine(fetch.obtain(name))
    for file in series.files():
        if (pristine / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(pristine / file, folder / file)
    for arguments in (["init", "-q", "-b", "base"], ["add", "-f", "."], ["commit", "-qm", "base"]):
        assert git(folder, *arguments).returncode == 0
    wrong, applied = {}, 0
    for chosen in sets(series):  # small sets first: each is another one with a part on top
        set_name, below = "+".join(chosen), "+".join(chosen[:-1]) or "base"
        if git(folder, "checkout", "-q", "-f", "-B", set_name, below).returncode:
            continue
        patches = sorted((series.root / "parts" / chosen[-1]).glob("*.patch"))
        if patches and (done := git(folder, "am", "-q", *map(str, patches))).returncode:
            wrong[set_name] = done.stderr
            git(folder, "am", "--abort")
            git(folder, "checkout", "-q", "--detach")
            git(folder, "branch", "-D", set_name)
        applied += 1
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
    assert applied == len([*sets(series)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linux", "qemu"])
def test_plain_git_am(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    inputs = [paths.REPO / name, Path(__file__), paths.REPO / "tests" / "sets.py"]
    with unchanged.since_it_passed(f"am-{name}", inputs) as same:
        record_property("unchanged since it passed", same)
        if not same:
            applies_by_hand(name, tmp_path)


def boots(variant: str, chosen: tuple[str, ...]) -> None:
    """User-Mode Linux with these parts boots, on or off, and passes their unit tests."""
    image = build_linux(variant, "um", chosen=chosen)
    done = boot(BootSpec(kernel=image, arch="um", memory="512M", command=["cat", "/proc/vmstat"]))
    assert done.exit_code == 0 and not done.violations
    on = variant == "debug" and (not chosen or "zeroed" in chosen)
    assert ("pgzeroed_bad" in done.stdout) == on
    if on:
        cases = kunit.run("um", "*zero*", image)
        assert all(case.state != "failed" for case in cases), cases
        passed = {case.name.split(".")[0] for case in cases if case.state == "passed"}
        wanted = {"page_zeroed_rules", "page_zeroed_alloc"}
        assert passed >= wanted | (
            {"page_zeroed_prezero"} if not chosen or "prezero" in chosen else set()
        ), passed


@pytest.mark.nightly
@pytest.mark.matrix
@pytest.mark.boots
@pytest.mark.timeout(3600)  # builds wait for each other
@pytest.mark.parametrize(("variant", "chosen"), [*EVERY, ("off", ())])
def test_every_set_of_parts_boots(variant: str, chosen: tuple[str, ...]) -> None:
    boots(variant, chosen)


@pytest.mark.nightly
@pytest.mark.matrix
@pytest.mark.boots
@pytest.mark.timeout(7200)
def test_clean_parts_boot_on_other_kernels() -> None:
    """Of each other source of the mirror.

    User-Mode Linux with the parts that apply without a merge, in both configurations.
    """
    built = []
    own = fetch.tree_version("linux", fetch.pristine(fetch.obtain("linux")))
    for report in against.against("linux", "all"):
        clean: list[str] = []
        for part in parts.get("linux").parts:
            if report.parts[part.name] == against.CLEAN and set(part.on) <= set(clean):
                clean.append(part.name)
        if not clean or report.version == own:
            continue
        series, tree = parts.get("linux", clean), paths.sub("work") / f"other-{report.version}"
        apply.at_patch(series, report.tree, tree, series.patches())
        for variant in ("off", "debug"):
            obj = paths.sub("obj") / f"other-{report.version}-{variant}"
            log = paths.log_file(f"other-{report.version}-{variant}")
            make_linux(
                tree, obj, fragments(variant, "um"), "um", variant, log, ["linux"], step=True
            )
            done = boot(
                BootSpec(kernel=obj / "linux", arch="um", memory="512M", command=["uname", "-r"])
            )
            assert done.exit_code == 0 and not done.violations
            built.append(f"{done.stdout.strip()} {variant} {' '.join(clean)}")
    print("\n".join(built))
    assert built
