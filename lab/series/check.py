# SPDX-License-Identifier: GPL-2.0
"""``kz series check``: patches apply exactly, pass checkpatch, survive saving."""

from pathlib import Path

from lab.build.images import jobs
from lab.core import progress
from lab.core.errors import LabError
from lab.machine import fetch
from lab.patches import apply, parts
from lab.patches.parts import Series
from lab.patches.repo import commit_parts, small
from lab.series import steps, tree
from lab.series.checkpatch import Problem, checkpatch


def check(name: str, each: bool = False) -> list[Problem]:
    """Run all checks of a series. ``each``: build after every patch."""
    series = parts.get(name)
    if not series.patches():
        why, fix = f"{series.root}/parts has no patches", "kz series save"
        raise LabError(f"there is no {name} series", why, fix, 1)
    pristine = fetch.pristine(fetch.obtain(name))
    with progress.step(f"applying the {name} series"):
        found = applies(series, pristine)
    if found:
        return found
    with progress.step(f"saving the {name} series"), small(series, pristine) as repo:
        commit_parts(repo, series)
        names = (str(file.relative_to(series.root)) for file in tree.unsaved(repo, series))
        found += [
            Problem("save", name, "saving the unchanged series changes this file") for name in names
        ]
    with progress.step(f"checkpatch on the {name} series"):
        found += checkpatch(series, pristine, series.patches(), jobs())
    if each:
        found += [Problem("build", where, text) for where, text in steps.build_each(series)]
    return found


def applies(series: Series, pristine: Path) -> list[Problem]:
    """The recorded order applies with full context, and so does each part on just what it stands
    on.
    """
    found = []
    sets = [tuple(part.name for part in series.parts)]
    sets += [
        tuple(part.name for part in parts.get(series.name, [one.name]).parts)
        for one in series.parts
    ]
    for chosen in dict.fromkeys(sets):
        try:
            apply.result(parts.get(series.name, chosen), pristine)
        except LabError as error:
            found.append(Problem("apply", " + ".join(chosen), f"{error.what}: {error.why}"))
    return found
