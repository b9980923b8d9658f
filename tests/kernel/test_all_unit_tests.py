# SPDX-License-Identifier: GPL-2.0
"""All of the kernel's unit tests that run in User-Mode Linux end as they do without the series."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from lab.build import images, linux
from lab.core import paths, run
from lab.machine import fetch
from tests.kernel import kunit

pytestmark = [pytest.mark.boots, pytest.mark.nightly, pytest.mark.slow, pytest.mark.matrix]

# The tests of the series need a tracer, and all_tests.config has none.
BOTH = {"CONFIG_FTRACE": "y", "CONFIG_ENABLE_DEFAULT_TRACERS": "y"}


def results(variant: str, options: dict[str, str]) -> dict[str, str]:
    """How each test of the kernel's all_tests.config ended.

    ``options``: more of its configuration.
    """
    obj = paths.sub("obj", f"kunit-{variant}")
    environment = images.cached_environment() | {"PYTHONDONTWRITEBYTECODE": "1"}
    with images.tree_of("linux", variant, fetch.obtain("linux")) as tree:
        tool = [sys.executable, str(tree / "tools" / "testing" / "kunit" / "kunit.py")]
        more = [f"--kconfig_add={name}={value}" for name, value in options.items()]
        run.logged(
            [*tool, "build", "--alltests", f"--build_dir={obj}", f"--jobs={images.jobs()}", *more],
            paths.log_file(f"kunit-{variant}"),
            f"the kernel with all unit tests does not build ({variant})",
            "correct the first error above, then run it again",
            cwd=tree,
            env=environment,
        )
        # Its exit code counts tests that fail without the series as well.
        execute = [*tool, "exec", f"--build_dir={obj}", "--timeout=2400"]
        subprocess.run(execute, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=False)
    found = kunit.parse((obj / "test.log").read_text(errors="replace"))
    states = {case.name: case.state for case in found}
    print(f"{variant}: {dict(Counter(states.values()))}")
    print("failed:", sorted(name for name, state in states.items() if state == "failed"))
    return states


@pytest.mark.timeout(10800)
def test_all_unit_tests() -> None:
    base = results("base", BOTH)
    ours = results("knownzero", BOTH | linux.requested(linux.fragments("knownzero", "um")[-1:]))
    assert Counter(base.values())["passed"] > 1000
    changed = {
        name: (state, ours.get(name, "missing"))
        for name, state in base.items()
        if ours.get(name) != state
    }
    assert not changed, f"ended differently with the series: {changed}"
    added = {name: ours[name] for name in ours.keys() - base.keys()}
    assert added and all(name.startswith("page_zeroed") for name in added), sorted(added)
    assert "failed" not in added.values(), added
