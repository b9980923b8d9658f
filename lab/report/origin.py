# SPDX-License-Identifier: GPL-2.0
"""Whether a result measured the series of this checkout."""

from lab.core.paths import REPO
from lab.core.run import ask
from lab.patches import parts
from lab.report.results import Result

PATCHES = ("linux/parts/*/series", "linux/parts/*/*.patch")
THIS, UNKNOWN = "this series", "unknown"
FEW = 3  # parts that changed, and are named


def changed(result: Result) -> list[str]:
    """The parts of Linux that the result did not measure as they are now."""
    kernel = {name: key for name, key in parts.keys().items() if name.startswith("linux/")}
    return [name for name, key in kernel.items() if result.parts.get(name) != key]


def later(commit: str) -> str:
    """The first commit to the patches of linux/parts after ``commit``; "" if git shows none."""
    known = commit.removesuffix("-dirty").rpartition("-g")[2]
    log = ["git", "-C", str(REPO), "log", "--reverse", "--abbrev=7", "--format=%h %s"]
    found = ask([*log, f"{known}..HEAD", "--", *(f":(glob){one}" for one in PATCHES)])
    return found.stdout.partition("\n")[0] if found.returncode == 0 else ""


def words(result: Result) -> str:
    """THIS, or the first change of the series that the result lacks; with the parts, if few."""
    if not (parts_of := changed(result)):
        return THIS
    commit = result.versions.get("knownzero", "")
    if not (first := later(commit) if result.parts else ""):
        return UNKNOWN
    if len(parts_of) > FEW:
        return f"before {first}"
    names = ", ".join(name.removeprefix("linux/") for name in parts_of)
    return f"{THIS}, except {names} (before {first})"
