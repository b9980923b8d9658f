# SPDX-License-Identifier: GPL-2.0
"""Bytes the guest's kernel stores with ``rep stos``, counted by the emulator, outside the guest."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from lab.bench.plugin import build_plugin
from lab.bench.repeat import NOTE as REPEATED
from lab.bench.repeat import Values, turns
from lab.bench.runner import Run
from lab.bench.session import MIB, Side, settle_both
from lab.core.progress import step
from lab.report.results import Target

MODES = {"populate": "populate", "touch_all": "populate, touch everything"}
LIMIT = 1.0
BEHIND_S = 0.05  # the plugin writes its count every few milliseconds
NOTE = (
    "A TCG plugin outside the guest counts every byte the guest's kernel stores with `rep stos`, the instruction that "
    "clears pages on this CPU model. The kernel fills a little other memory that way as well."
)


def _count(file: Path) -> int:
    time.sleep(BEHIND_S)
    return int.from_bytes(file.read_bytes()[:8], "little")


def _job(side: Side, size_mb: int, mode: str, file: Path) -> float:
    before = _count(file)
    side.json("alloc_once", "--size", str(size_mb), "--mode", mode, "--pages", "thp")
    return float(_count(file) - before)


def measure(run: Run) -> None:
    """The job in both guests under the plugin."""
    run.note(NOTE, REPEATED)
    plugin, found, size = build_plugin("zerobytes"), Values(), run.options.size_mb
    with tempfile.TemporaryDirectory(prefix="zerobytes-") as folder:
        files = {name: Path(folder) / name for name in ("base", "ours")}
        extra = {name: ["-plugin", f"{plugin},out={file}"] for name, file in files.items()}
        with (
            run.pair(extra=extra) as both,
            step(f"bytes stored by rep stos: up to {run.pairs} pairs of each mode"),
        ):
            for mode in MODES:
                for side, _ in turns(
                    both, run.pairs, found.both(mode), warm_ups=0, before=lambda: settle_both(both)
                ):
                    found[side.name, mode].append(_job(side, size, mode, files[side.name]))
    for mode, label in MODES.items():
        share = max(found["ours", mode]) / (size * MIB) * 100
        target = Target(f"at most {LIMIT:.0f} % of the memory ({share:.2f} %)", share <= LIMIT)
        words = f"Bytes the guest's kernel fills with rep stos for {size} MB: {label}."
        run.add(f"zerobytes.{mode}.rep_stos_bytes", "bytes", found.both(mode), words, target)
