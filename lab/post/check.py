# SPDX-License-Identifier: GPL-2.0
"""Checks of a series: it applies exactly, reads well to checkpatch, survives saving."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.build.images import jobs
from lab.core import lock, paths, progress
from lab.core.errors import LabError
from lab.machine import fetch
from lab.post import steps
from lab.series import series, tree
from lab.series.checkpatch import KERNEL_ONLY, Problem, complaints

# Texts without a place for a licence line, as their neighbours in the kernel are.
NO_SPDX = re.compile(r"^Documentation/ABI/|\.txt$|\.kunitconfig$|/\.gitignore$|\.json$")


def check(name: str, each: bool = False, whole: bool = False, first: int = 0) -> list[Problem]:
    """Run all checks of one series; an empty list means that it is in order.

    ``each``: build after every patch, from number ``first`` on; ``whole``: all of it, not only what the
    series can have broken.
    """
    what = series.get(name)
    if what.empty():
        raise LabError(
            f"there is no {name} series",
            f"{what.root} has neither patches nor new files",
            "save one with kz series save",
            1,
        )
    pristine = fetch.pristine(fetch.obtain(name))
    found = listing(what) + licences(what)
    with progress.step(f"applying the {name} series"):
        found += applies(what, pristine)
    if any(p.check == "apply" for p in found):
        return found
    with progress.step(f"checkpatch on the {name} series"):
        found += checkpatch(what, pristine)
    with progress.step(f"saving the {name} series again"):
        found += saves_clean(what, pristine)
    if each:
        found += [Problem("build", where, text) for where, text in steps.build_each(what, whole, first)]
    return found


def listing(what: series.Series) -> list[Problem]:
    """Every patch is listed once, and numbers rise."""
    listed = [p.name for p in what.patches()]
    found = [
        Problem("listing", n, "is not in patches/series")
        for n in sorted(p.name for p in what.patch_root.glob("*.patch"))
        if n not in listed
    ]
    for before, after in itertools.pairwise(listed):
        if tree.number_of(after) <= tree.number_of(before):
            found.append(Problem("listing", after, f"its number does not come after that of {before}"))
    return found


def licences(what: series.Series) -> list[Problem]:
    """New files say their licence in one of their first lines."""
    found = []
    for name in what.new_files():
        head = (what.new_root / name).read_text(errors="replace").splitlines()[:3]
        if not NO_SPDX.search(name) and not any("SPDX-License-Identifier:" in line for line in head):
            found.append(Problem("licence", name, "has no SPDX-License-Identifier in its first three lines"))
    return found


def applies(what: series.Series, pristine: Path) -> list[Problem]:
    """All patches apply with their whole context."""
    try:
        series.result(what, pristine)
    except LabError as error:
        return [Problem("apply", what.name, f"{error.what}: {error.why}")]
    return []


def checkpatch(what: series.Series, pristine: Path) -> list[Problem]:
    """The source's own scripts/checkpatch.pl has nothing to say.

    What it had nothing to say of is not shown to it again until it changes.
    """
    script = pristine / "scripts" / "checkpatch.pl"
    options = ["--no-summary", "--terse", "--color=never"]
    if what.name == "linux":
        options += ["--show-types"]
    used = set()

    def one(file: Path, new: str) -> list[Problem]:
        content = file.read_bytes()
        mine = [*options, f"--ignore={KERNEL_ONLY}"] if new.startswith("tools/") else options
        key = hashlib.sha256(
            json.dumps([pristine.name, new or file.name, mine]).encode() + content
        ).hexdigest()
        stamp = paths.sub("passed") / f"checkpatch-{what.name}-{key[:24]}"
        used.add(stamp.name)
        if stamp.is_file():
            return []
        if new:
            # A relative name, as if it stood in the tree: some rules go by the path.
            with tempfile.TemporaryDirectory(prefix=".checkpatch-", dir=paths.sub("work")) as folder:
                place = Path(folder) / new
                place.parent.mkdir(parents=True)
                place.write_bytes(content)
                argv = ["perl", str(script), *mine, f"--root={pristine}", "-f", new]
                found = complaints(argv, Path(folder), new)
        else:
            found = complaints(["perl", str(script), *mine, str(file)], pristine, file.name)
        if not found:
            lock.write_atomically(stamp, "")
        return found

    files = [(patch, "") for patch in what.patches()]
    files += [(what.new_root / name, name) for name in what.new_files()]
    with ThreadPoolExecutor(jobs()) as pool:
        found = [problem for problems in pool.map(lambda item: one(*item), files) for problem in problems]
    for stamp in paths.sub("passed").glob(f"checkpatch-{what.name}-*"):
        if stamp.name not in used:
            stamp.unlink(missing_ok=True)
    return found


def saves_clean(what: series.Series, pristine: Path) -> list[Problem]:
    """Saving the commits that the series makes gives the very files that are kept."""
    with tree.small(what, pristine) as repo:
        tip = tree.commit_series(repo, tree.BASE, what)
        changed = tree.differences(what, tree.kept(repo, tree.BASE, tip, tree.known_numbers(what)))
    return [Problem("save", name, "saving the unchanged series would change this file") for name in changed]
