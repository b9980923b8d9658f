# SPDX-License-Identifier: GPL-2.0
"""What is not in order, and what a source's checkpatch.pl calls so."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab.series import series

# Headers that come from the kernel series next door, not from a released kernel.
EXPECTED = re.compile(r"0\d+-linux-headers-.*added, moved or deleted file\(s\) imported from Linux")

# Rules that ask for what only the kernel has, and not a program of its own in tools/.
KERNEL_ONLY = (
    "ARRAY_SIZE,COMPLEX_MACRO,EMBEDDED_FILENAME,ENOSYS,FLEXIBLE_ARRAY,IS_ENABLED_CONFIG,"
    "MACRO_ARG_UNUSED,NEW_TYPEDEFS,PREFER_DEFINED_ATTRIBUTE_MACRO,VOLATILE"
)


@dataclass(frozen=True)
class Problem:
    """One thing that is not in order: which check, where, and what."""

    check: str
    where: str
    text: str


def complaints(argv: list[str], cwd: Path, where: str) -> list[Problem]:
    """What a checkpatch.pl says, line by line, but what is known of."""
    done = subprocess.run(
        argv, cwd=cwd, env=series.git_environment(cwd.parent), capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if re.search(r"\b(?:ERROR|WARNING|CHECK)\b", line)]
    if not lines and done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-3:] or [f"exit code {done.returncode}"]
    return [
        Problem("checkpatch", where, line.strip()) for line in lines if not EXPECTED.search(f"{where} {line}")
    ]
