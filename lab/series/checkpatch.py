# SPDX-License-Identifier: GPL-2.0
"""Run a source's checkpatch.pl on patches; patches that passed are not checked again until they change."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lab.core import lock, paths
from lab.core.errors import LabError
from lab.series.apply import git_environment
from lab.series.parts import Series, touched

# Lines of a mail that differ between two exports of the same patch.
VARIES = re.compile(
    rb"^From [0-9a-f]{40} .*\n|^(?:Message-I[dD]|In-Reply-To|References|Date): .*\n|\[PATCH[^]]*\]",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Problem:
    """One failed check: which, where, and its text."""

    check: str
    where: str
    text: str


def complaints(argv: list[str], cwd: Path, where: str) -> list[Problem]:
    """The errors, warnings and checks that a checkpatch.pl prints."""
    done = subprocess.run(
        argv, cwd=cwd, env=git_environment(cwd.parent), capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if re.search(r"\b(?:ERROR|WARNING|CHECK)\b", line)]
    if not lines and done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-3:] or [f"exit code {done.returncode}"]
    return [
        Problem("checkpatch", where, line.strip().partition(f"{where}:")[2] or line.strip()) for line in lines
    ]


def accepted(series: Series, patch: bytes) -> list[str]:
    """Exceptions of parts.toml that hold for a patch: a table {type, reason, only} each; ``only`` is a path prefix."""
    found = []
    for one in series.rules.get("checkpatch", []):
        if not one.get("reason"):
            raise LabError(
                f"{series.name}/parts.toml: exception {one.get('type')}",
                "it has no reason",
                'add reason = "…"',
            )
        if not one.get("only") or all(
            name.startswith(one["only"]) or name == "MAINTAINERS" for name in touched(patch)
        ):
            found.append(str(one["type"]))
    return found


def checkpatch(
    series: Series, pristine: Path, mails: Sequence[Path], jobs: int, signed: bool = False
) -> list[Problem]:
    """``checkpatch.pl --strict`` on mails. ``signed``: they carry a sign-off (exported mails; kept patches do not)."""
    script = pristine / "scripts" / "checkpatch.pl"
    always = [
        "--no-summary",
        "--terse",
        "--color=never",
        *(["--strict", "--show-types"] if series.name == "linux" else []),
    ]

    def one(mail: Path) -> list[Problem]:
        whole = mail.read_bytes()
        ignored = accepted(series, whole) + ([] if signed else ["MISSING_SIGN_OFF"])
        options = (
            [*always, f"--ignore={','.join(ignored)}"]
            if series.name == "linux"
            else [*always, *([] if signed else ["--no-signoff"])]
        )
        key = hashlib.sha256(
            json.dumps([pristine.name, options, signed]).encode() + VARIES.sub(b"", whole)
        ).hexdigest()
        stamp = paths.sub("passed") / f"checkpatch-{series.name}-{key[:24]}"
        if stamp.is_file():
            stamp.touch()
            return []
        found = complaints(["perl", str(script), *options, str(mail)], pristine, str(mail))
        found = [
            Problem(p.check, f"{mail.parent.name}/{mail.name}", p.text)
            for p in found
            if series.name != "qemu" or not _qemu_knows(p)
        ]
        if not found:
            lock.write_atomically(stamp, "")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return [problem for problems in pool.map(one, mails) for problem in problems]


def _qemu_knows(problem: Problem) -> bool:
    """QEMU's script has no --ignore: header updates from Linux, and the sign-off that export adds."""
    return bool(
        re.search(
            r"added, moved or deleted file\(s\) imported from Linux|Missing Signed-off-by", problem.text
        )
    )
