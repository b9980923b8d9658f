# SPDX-License-Identifier: GPL-2.0
"""The repository itself: clean Python, licences, nothing that ties it to one machine."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.core.paths import REPO

PYTHON = ["kz", "lab", "tests", "tools"]
# Files without a place for a comment, texts that are licences, and what other projects write.
NO_SPDX = re.compile(
    r"^LICENSES/|/LICENSE-[^/]+$|\.(?:patch|json|txt|svg|lock|png)$|/Documentation/ABI/|\.kunitconfig$"
    r"|/(?:parts|lts/[^/]+)/[^/]+/(?:series|cover-letter)$"
)


def tracked() -> list[str]:
    done = subprocess.run(
        ["git", "-C", str(REPO), "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("this is no git checkout")
    return [name for name in done.stdout.split("\0") if name and (REPO / name).is_file()]


@pytest.mark.parametrize(
    "arguments",
    [["ruff", "check", *PYTHON], ["ruff", "format", "--check", *PYTHON], ["mypy"]],
    ids=lambda words: " ".join(words[:2]),
)
def test_python_is_clean(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_names_its_licence() -> None:
    without = []
    for name in tracked():
        if not NO_SPDX.search(name):
            head = (REPO / name).read_bytes()[:600].decode(errors="replace")
            if "SPDX-License-Identifier:" not in head:
                without.append(name)
    assert without == []


def test_the_repository_belongs_to_no_machine() -> None:
    """Mirrors come from the machine's configuration, and paths from the user."""
    found = []
    for name in tracked():
        text = (REPO / name).read_bytes().decode(errors="replace")
        for match in re.finditer(
            r"deb\.debian\.org|pypi\.org|pythonhosted|(?<![\w.])/(?:root|work|home)/[\w.-]+", text
        ):
            if Path(name) != Path("tests/lab/test_repo.py"):
                found.append(f"{name}: {match[0]}")
    assert found == []


def test_the_first_group_of_packages_needs_none_of_the_second() -> None:
    """`kz boot` and `kz package` get the first one only."""
    text = (REPO / "requirements.lock").read_text()
    first, second = (
        {name.lower() for name in re.findall(r"(?m)^([A-Za-z0-9.-]+)==", group)}
        for group in text.split("# group: measure and test\n")
    )
    assert {"typer", "rich", "jinja2", "qemu-qmp", "meson"} <= first
    assert {"scipy", "hypothesis", "pytest", "ruff"} <= second
    needed = set()
    for name in first - {"colorama"}:  # of Windows
        for line in importlib.metadata.requires(name) or []:
            if "extra ==" not in line:
                needed.add(re.split(r"[^A-Za-z0-9-]", line.replace("_", "-"))[0].lower())
    assert needed & second == set()
