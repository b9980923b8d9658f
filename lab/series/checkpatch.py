# SPDX-License-Identifier: GPL-2.0
"""Run a source's checkpatch.pl on patches.

Patches that passed are not checked again until they change.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lab.core import lock, paths, run
from lab.core.errors import LabError
from lab.patches.parts import Series
from lab.patches.repo import git_environment

# Lines of a mail that differ between two exports of the same patch.
VARIES = re.compile(
    rb"(?m)^From [0-9a-f]{40} .*\n|^(?:Message-I[dD]|In-Reply-To|References|Date): "
    rb".*\n|\[PATCH[^]]*\]"
)
# QEMU's script has no types: header updates from Linux, and the sign-off that export adds.
QEMU = re.compile(r"added, moved or deleted file\(s\) imported from Linux|Missing Signed-off-by")


@dataclass(frozen=True)
class Problem:
    """One failed check: which, where, and its text."""

    check: str
    where: str
    text: str


def complaints(argv: list[str], cwd: Path) -> list[str]:
    """The errors, warnings and checks that a checkpatch.pl prints."""
    done = run.ask(argv, cwd, git_environment(cwd.parent))
    lines = [
        line for line in done.stdout.splitlines() if re.search(r"\b(?:ERROR|WARNING|CHECK)\b", line)
    ]
    if not lines and done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-3:] or [
            f"exit code {done.returncode}"
        ]
    return lines


def accepted(series: Series, line: str) -> bool:
    """Whether parts.toml accepts a report, in all files or in those whose names begin with
    ``only``.
    """
    match = re.search(r"^(?:(\S*):\d+: )?(?:ERROR|WARNING|CHECK):(\w+):", line)
    for one in series.rules.get("checkpatch", []):
        if not one.get("reason"):
            why, fix = "it has no reason", "add its reason"
            raise LabError(f"{series.name}/parts.toml: exception {one.get('type')}", why, fix)
        if (
            match
            and match[2] in one["type"].split(",")
            and (match[1] or "").startswith(one.get("only", ""))
        ):
            return True
    return series.name == "qemu" and bool(QEMU.search(line))


def checkpatch(
    series: Series, pristine: Path, mails: Sequence[Path], jobs: int, signed: bool = False
) -> list[Problem]:
    """``checkpatch.pl --strict`` on mails.

    ``signed``: they carry a sign-off. Exported mails do, kept patches do not.
    """
    script = pristine / "scripts" / "checkpatch.pl"
    options = ["--no-summary", "--terse", "--color=never", *([] if signed else ["--no-signoff"])]
    if series.name == "linux":
        options += ["--strict", "--show-types", "--showfile"]
    rules = json.dumps([pristine.name, options, series.rules.get("checkpatch", [])]).encode()

    def one(mail: Path) -> list[Problem]:
        key = hashlib.sha256(rules + VARIES.sub(b"", mail.read_bytes())).hexdigest()
        stamp = paths.sub("passed") / f"checkpatch-{series.name}-{key[:24]}"
        if stamp.is_file():
            stamp.touch()
            return []
        lines = complaints(["perl", str(script), *options, str(mail)], pristine)
        found = [
            line.strip().removeprefix(f"{mail}:") for line in lines if not accepted(series, line)
        ]
        if not found:
            lock.write_atomically(stamp, "")
        return [Problem("checkpatch", f"{mail.parent.name}/{mail.name}", line) for line in found]

    with ThreadPoolExecutor(jobs) as pool:
        return [problem for problems in pool.map(one, mails) for problem in problems]
