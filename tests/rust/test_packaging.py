# SPDX-License-Identifier: GPL-2.0
"""What is installed beside the daemon agrees with it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lab import daemon, paths
from lab.run import output

PACKAGING = paths.REPO / "packaging"


def test_the_unit_is_confined(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "vhost-user-balloon@guest.service"
    shutil.copy(PACKAGING / "systemd" / "vhost-user-balloon@.service", unit)
    done = subprocess.run(
        [tool, "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) < 2.0, done.stdout


@pytest.mark.slow
def test_the_unit_starts_it_with_options_it_has() -> None:
    unit = (PACKAGING / "systemd" / "vhost-user-balloon@.service").read_text()
    command = re.search(r"^ExecStart=(.*)$", unit, re.M)
    assert command
    options = re.findall(r"--[a-z-]+", command[1])
    text = output([daemon.build(), "--help"], "no help", "build it")
    assert options
    assert [option for option in options if f"{option} " not in text and f"{option}\n" not in text] == []


@pytest.mark.slow
def test_what_vmms_are_told_is_what_it_prints() -> None:
    told = json.loads((PACKAGING / "qemu" / "50-vhost-user-balloon.json").read_text())
    printed = json.loads(output([daemon.build(), "--print-capabilities"], "nothing printed", "build it"))
    assert told["type"] == printed["type"] == "balloon"
    assert Path(told["binary"]).name == daemon.NAME
