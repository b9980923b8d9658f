# SPDX-License-Identifier: GPL-2.0
"""What the machine lacks is named by packages that have it, all in one command."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lab.build import linux as build
from lab.core import errors
from lab.core.errors import LabError
from lab.machine import apt, tools

REPO = Path(__file__).resolve().parents[2]
POLICY = """\
cargo:
  Installed: (none)
  Candidate: {cargo}
  Version table:
     {cargo} 500
        500 http://mirror.invalid/debian bookworm/main amd64 Packages
cargo-web:
  Installed: (none)
  Candidate: {web}
  Version table:
"""


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat <<'E'\n{text}\nE\n", encoding="utf-8")
    file.chmod(0o755)


def test_packages_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "has", lambda check: False)
    absent = tools.missing("linux", "qemu")
    assert "flex" in absent
    assert len(absent) == len(set(absent))


def test_without_the_right_to_install_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt, "may_install", lambda: None)
    monkeypatch.setattr(tools, "has", lambda check: check != "bison")
    with pytest.raises(LabError) as caught:
        tools.need("linux")
    assert caught.value.fix == "run: sudo apt-get install -y --no-install-recommends bison"
    assert caught.value.code == errors.MACHINE


def test_a_tool_that_is_too_old_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt, "install", lambda *_: None)
    monkeypatch.setattr(tools, "candidates", lambda _: {"cargo": "1.75.0"})
    monkeypatch.setattr(tools, "has", lambda check: not check.startswith("cargo"))
    with pytest.raises(LabError) as caught:
        tools.need("daemon")
    assert caught.value.why == "still missing: cargo>=1.88"


def test_a_cross_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt, "may_install", lambda: None)
    monkeypatch.setattr(tools, "has", lambda check: False)
    with pytest.raises(LabError) as caught:
        build.build_linux("debug", "arm64")
    assert caught.value.fix.endswith(" gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    assert caught.value.code == errors.MACHINE
    tools.need_compiler("x86_64")


@pytest.mark.parametrize(
    ("cargo", "web", "names"),
    [
        ("0.66.0+ds1-1", "1.96.0+dfsg1-1~deb12u2", ["cargo-web", "rustfmt-web", "rust-web-clippy"]),
        ("1.92.0+dfsg1-2", "(none)", ["cargo", "rustfmt", "rust-clippy"]),
        ("1.92.0+dfsg1-2", "1.96.0+dfsg1-1", ["cargo", "rustfmt", "rust-clippy"]),
        ("(none)", "(none)", ["cargo", "rustfmt", "rust-clippy"]),
    ],
)
def test_of_two_rusts_the_one_that_is_new_enough(
    cargo: str, web: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "apt-cache", POLICY.format(cargo=cargo, web=web))
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr(tools, "has", lambda check: False)
    assert tools.missing("daemon", "daemon's tests") == names


def test_lists_that_are_absent_are_fetched_before_names_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a fresh container."""
    program(tmp_path, "apt-cache", "")
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr(tools, "has", lambda check: False)

    def update() -> None:
        program(tmp_path, "apt-cache", POLICY.format(cargo="0.66.0+ds1-1", web="1.96.0+dfsg1-1"))

    assert tools.missing("daemon", update=update) == ["cargo-web"]
    assert "flex" in tools.missing("linux", update=lambda: pytest.fail("not needed"))


@pytest.mark.parametrize(
    ("says", "there"),
    [
        ("cargo 1.95.0 (f2d3ce0bd 2026-03-24)", True),
        ("cargo 0.66.0", False),
        ("cargo 1.9.9", False),
        ("", False),
    ],
)
def test_a_program_can_be_too_old(
    says: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "cargo", says)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    assert tools.has("cargo>=1.88") is there
    assert not tools.has("no-such-program>=1.0")


def test_the_oldest_rust_is_that_of_the_workspace() -> None:
    workspace = tomllib.loads(
        (REPO / "vhost-user-balloon" / "Cargo.toml").read_text(encoding="utf-8")
    )
    assert workspace["workspace"]["package"]["rust-version"] == ".".join(map(str, tools.RUST))


def test_it_needs_nothing_but_the_standard_library() -> None:
    """kz asks it before the lab's environment is there."""
    code = (
        "import sys; from lab.machine import tools; tools.missing(*tools.TESTS); "
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(REPO)!r}); {code}",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = {name.split(".")[0] for name in done.stdout.split()}
    assert modules - set(sys.stdlib_module_names) - {"__main__"} == {"lab"}
