# SPDX-License-Identifier: GPL-2.0
"""Bytes the guest's kernel stores with ``rep stos``, counted by the emulator: no word of the guest's is taken."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from lab.bench import BenchOptions
from lab.bench.jobs import elapsed, settle_both
from lab.bench.plugin import build_plugin
from lab.bench.repeat import NOTE as REPEATED
from lab.bench.repeat import until_known
from lab.bench.session import MIB, Built, Side, built, host_facts, pair, reproduce
from lab.core.progress import step
from lab.report.results import Metric, Result, Target

MODES = ("populate", "touch_all")
LIMIT = 1.0
BEHIND_S = 0.05  # the plugin writes its count every few milliseconds
NOTE = (
    "Counted outside the guest by a TCG plugin: every byte the guest's kernel stores with `rep stos`, which is how it "
    "clears pages on this CPU model. It fills a little other memory that way as well."
)


def _count(file: Path) -> int:
    time.sleep(BEHIND_S)
    return int.from_bytes(file.read_bytes()[:8], "little")


def _job(side: Side, options: BenchOptions, mode: str, file: Path) -> float:
    before = _count(file)
    side.json("alloc_once", "--size", str(options.size_mb), "--mode", mode, "--pages", "thp")
    return float(_count(file) - before)


def measure(options: BenchOptions, images: Built) -> list[Metric]:
    """Run the job in both guests under the plugin."""
    plugin = build_plugin("zerobytes")
    found: dict[str, dict[str, list[float]]] = {mode: {"base": [], "ours": []} for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="zerobytes-") as folder:
        files = {name: Path(folder) / name for name in ("base", "ours")}
        extra = {name: ["-plugin", f"{plugin},out={file}"] for name, file in files.items()}
        with (
            pair(options.with_accel("tcg"), images, extra) as both,
            step(f"bytes stored by rep stos: up to {options.pairs} pairs for each of {', '.join(MODES)}"),
        ):
            for mode in MODES:
                for turn in until_known(options.pairs, found[mode].values()):
                    settle_both(both)
                    for side in both.sides(turn):
                        found[mode][side.name].append(_job(side, options, mode, files[side.name]))
    metrics = []
    for mode in MODES:
        share = max(found[mode]["ours"]) / (options.size_mb * MIB) * 100
        metrics.append(
            Metric.of(
                f"zerobytes.{mode}.rep_stos_bytes",
                "bytes",
                found[mode]["base"],
                found[mode]["ours"],
                sentence=f"Bytes the guest's kernel filled with rep stos during {mode} of {options.size_mb} MB.",
                target=Target(f"at most {LIMIT:.0f} % of the memory ({share:.2f} %)", share <= LIMIT),
            )
        )
    return metrics


def run(options: BenchOptions) -> Result:
    """Count zeroed bytes from outside; always under TCG; raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    metrics = measure(options, images)
    return Result(
        name="zerobytes",
        accelerator="tcg",
        versions=images.versions(),
        reproduce=reproduce("zerobytes", options, "tcg"),
        metrics=metrics,
        job={"size_mb": options.size_mb, "memory": options.memory, "cpus": 1, "pairs": options.pairs},
        host=host_facts(),
        notes=[NOTE, REPEATED],
        seconds=elapsed(began),
    )
