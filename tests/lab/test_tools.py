# SPDX-License-Identifier: GPL-2.0
"""What the machine lacks is named by packages that have it, all in one command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab.machine import tools

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
    assert tools.missing("daemon", "daemon's tests") == [*names, "strace"]
