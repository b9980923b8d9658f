# SPDX-License-Identifier: GPL-2.0
"""The benches: each measures the base kernel and ours side by side. Imports core to report."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any, Literal

from lab.report.results import Result

Accel = Literal["auto", "kvm", "tcg"]


@dataclass(frozen=True)
class BenchOptions:
    """The options of a bench."""

    pairs: int = 10
    size_mb: int = 256
    memory: str = "2G"
    accel: Accel = "auto"
    base: str = "base"
    ours: str = "knownzero"
    qemu: str = "knownzero"  # or stock: with the daemon as its balloon

    @property
    def memory_mb(self) -> int:
        """Memory of a guest in MB."""
        return int(self.memory[:-1]) * {"G": 1024, "M": 1}[self.memory[-1]]

    def with_accel(self, accel: Accel) -> BenchOptions:
        return replace(self, accel=accel)


@dataclass(frozen=True)
class Bench:
    """A bench: ``measure``, as "module:function" of lab.bench, takes its figures.

    ``accel`` is the only accelerator it can use, if any; ``both`` is False for a bench that runs our kernel only.
    """

    name: str
    sentence: str
    place: str
    accel: Literal["", "tcg"] = ""
    both: bool = True

    def measure(self, run: Any) -> None:
        """Take the figures with a ``Run`` of lab/bench/runner.py."""
        module, function = self.place.split(":")
        # Imported late: the command line lists the benches without loading what boots guests.
        getattr(importlib.import_module(f"lab.bench.{module}"), function)(run)

    def run(self, options: BenchOptions) -> Result:
        """Measure; raises LabError when that is not possible."""
        result: Result = importlib.import_module("lab.bench.runner").measure(self, options)
        return result


BENCHES: dict[str, Bench] = {
    bench.name: bench
    for bench in (
        Bench("thp", "the main job: 256 MB of huge pages, and the costs around it", "allocation:thp"),
        Bench("order0", "the same memory in 4 KiB pages", "allocation:order0"),
        Bench("hugetlb", "the same memory in huge pages of hugetlb, surplus and persistent", "allocation:hugetlb"),
        Bench("page-fault", "page faults at full speed, while free memory is reported", "page_fault:measure"),
        Bench("deflate", "memory that is used again after it was in the balloon", "allocation:deflate"),
        Bench("device", "the balloon in a process of its own, vhost-user-balloon, against the one in QEMU",
              "device:measure"),
        Bench("host", "host memory that comes back when the guest frees", "host:measure"),
        Bench("churn", "memory allocated and freed all the time, at report delays of 2000, 250 and 50 ms",
              "churn:measure"),
        Bench("prezero", "most of a guest's memory, zeroed before it is used", "prezero:measure"),
        Bench("scale", "the cost to report, flush and pre-zero guests of 1, 2, 4 and 8 GB, for each GiB",
              "scale:measure"),
        Bench("lockhold", "how long a zone's lock is held, in instructions", "lockhold:measure", "tcg"),
        Bench("zerobytes", "bytes zeroed, counted by the emulator", "allocation:zerobytes", "tcg"),
        Bench("hotpath", "instructions of the hot paths: compiled out, idle and active", "hotpath:measure", "tcg"),
        Bench("refpage", "memory that starts with a pattern: memset against refpage_create", "refpage:measure",
              both=False),
    )
}  # fmt: skip
