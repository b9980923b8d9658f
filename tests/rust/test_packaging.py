# SPDX-License-Identifier: GPL-2.0
"""What is installed beside the daemon agrees with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

from lab.build import daemon
from lab.core import paths
from lab.core.run import output
from tests import devices

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


# What the program calls to confine itself; of these, prctl(2) alone is in a group of every systemd.
CONFINING = {"seccomp", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"}


def filters() -> list[tuple[bool, list[str]]]:
    """The lines of the unit's system call filter.

    Whether one allows, and the calls and groups it names.
    """
    unit = (PACKAGING / "systemd" / "vhost-user-balloon@.service").read_text()
    lines = re.findall(r"^SystemCallFilter=(~?)(.*)$", unit, re.M)
    return [(denies == "", names.split()) for denies, names in lines]


def test_the_unit_allows_what_confines_it_by_name() -> None:
    """Groups differ between versions of systemd; names do not."""
    allowed: set[str] = set()
    for allows, names in filters():
        allowed = allowed | set(names) if allows else allowed - set(names)
    assert allowed >= CONFINING


def test_the_unit_allows_what_the_program_calls() -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")

    def members(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        text = output([tool, "--no-pager", "syscall-filter", name], "no such group", "see the unit")
        listed = [
            line.strip() for line in text.splitlines()[1:] if line.strip() and "#" not in line
        ]
        assert listed, text
        return set().union(*(members(member) for member in listed))

    # The first line decides what becomes of the rest; each later one adds or takes away.
    (first, _), *_ = lines = filters()
    assert first
    allowed: set[str] = set()
    for allows, names in lines:
        for name in names:
            allowed = allowed | members(name) if allows else allowed - members(name)
    source = (paths.REPO / "vhost-user-balloon" / "daemon" / "src" / "sandbox.rs").read_text()
    own = set(re.findall(r"\bSYS_([a-z0-9_]+)", source))
    assert {"fallocate", "ppoll", "recvmsg", "futex"} <= own
    assert (own | CONFINING | {"prctl"}) - allowed == set()
    # The unit is a filter all the same.
    assert not allowed & {"setuid", "mount", "bpf", "ptrace", "sched_setaffinity"}


@pytest.mark.slow
def test_the_unit_starts_it_with_options_it_has() -> None:
    unit = (PACKAGING / "systemd" / "vhost-user-balloon@.service").read_text()
    command = re.search(r"^ExecStart=(.*)$", unit, re.M)
    assert command
    options = re.findall(r"--[a-z-]+", command[1])
    text = output([devices.program(), "--help"], "no help", "build it")
    assert options
    assert [
        option for option in options if f"{option} " not in text and f"{option}\n" not in text
    ] == []


@pytest.mark.slow
def test_the_file_for_vmms_has_the_printed_capabilities() -> None:
    told = json.loads((PACKAGING / "qemu" / "50-vhost-user-balloon.json").read_text())
    printed = json.loads(
        output([devices.program(), "--print-capabilities"], "nothing printed", "build it")
    )
    assert told["type"] == printed["type"] == "balloon"
    assert Path(told["binary"]).name == daemon.NAME


@pytest.mark.slow
def test_cargo_packages_each_crate_without_a_warning(tmp_path: Path) -> None:
    """The archives have what docs.rs and crates.io show, and the owner fills in the address."""
    argv = ["cargo", "package", "--workspace", "--offline", "--no-verify", "--allow-dirty"]
    done = subprocess.run(
        argv,
        cwd=daemon.WORKSPACE,
        env={**os.environ, "CARGO_TARGET_DIR": str(tmp_path), "CARGO_TERM_COLOR": "never"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    archives = sorted((tmp_path / "package").glob("*.crate"))
    names = [archive.name.rpartition("-")[0] for archive in archives]
    assert names == ["balloon-discard", "balloon-protocol", "vhost-user-balloon"]
    for archive in archives:
        with tarfile.open(archive) as tar:
            file = tar.extractfile(f"{archive.stem}/Cargo.toml")
            assert file and f"{archive.stem}/README.md" in tar.getnames(), archive.name
            about = tomllib.loads(file.read().decode())["package"]
        assert about["readme"] == "README.md" and about["metadata"]["docs"]["rs"], archive.name
        assert about["repository"] == "https://example.invalid/knownzero"


def test_each_vm_has_a_socket_group_of_its_own() -> None:
    """A peer that can connect can take the place of the VM's front end."""
    unit = (PACKAGING / "systemd" / "vhost-user-balloon@.socket").read_text()
    found = re.findall(r"^(SocketGroup|SocketMode)=(.*)$", unit, re.M)
    assert found == [("SocketGroup", "balloon-%i"), ("SocketMode", "0660")]
