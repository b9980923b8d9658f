# SPDX-License-Identifier: GPL-2.0
"""The benches: each measures the base kernel and ours side by side. Imports core to report."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

from lab.report.results import Result

ACCELS = ("auto", "kvm", "tcg")


@dataclass(frozen=True)
class BenchOptions:
    """The options of a bench."""

    pairs: int = 10
    size_mb: int = 256
    memory: str = "2G"
    accel: str = "auto"
    base: str = "base"
    ours: str = "knownzero"
    qemu: str = "knownzero"  # or stock: with the daemon as its balloon

    @property
    def memory_mb(self) -> int:
        """Memory of a guest in MB."""
        return int(self.memory[:-1]) * {"G": 1024, "M": 1}[self.memory[-1]]

    def with_accel(self, accel: str) -> BenchOptions:
        return replace(self, accel=accel)


@dataclass(frozen=True)
class Bench:
    """A bench: a function of its name in ``module`` takes its figures, or ``measure`` of its own module.

    ``accel`` is the only accelerator it can use, if any; ``both`` is False for a bench that runs our kernel only.
    ``needs_gb`` of the machine's memory must be available.
    """

    name: str
    sentence: str
    module: str = ""
    accel: str = ""
    both: bool = True
    needs_gb: float = 0.0

    def measure(self, run: Any) -> None:
        """Take the figures with a ``Run`` of lab/bench/runner.py."""
        # Imported late: the command line lists the benches without loading what boots guests.
        module = importlib.import_module(f"lab.bench.{self.module or self.name.replace('-', '_')}")
        getattr(module, self.name if self.module else "measure")(run)

    def run(self, options: BenchOptions) -> Result:
        """Measure; raises LabError when that is not possible."""
        result: Result = importlib.import_module("lab.bench.runner").measure(self, options)
        return result


_ALL = (
    Bench("thp", "the main job: 256 MB of huge pages", "allocation"),
    Bench("order0", "the same memory in 4 KiB pages", "allocation"),
    Bench("hugetlb", "the same memory in hugetlb pages, surplus and persistent", "allocation"),
    Bench("page-fault", "page faults while free memory is reported"),
    Bench("deflate", "memory used again after it was in the balloon", "allocation"),
    Bench("device", "vhost-user-balloon against the balloon in QEMU"),
    Bench("both-ends", "a guest in a guest: bytes zeroed by the host and by the guest", accel="tcg"),
    Bench("host", "host memory that returns when the guest frees"),
    Bench("churn", "memory allocated and freed all the time, by report delay"),
    Bench("prezero", "free memory zeroed before it is used"),
    Bench("fleet", "host memory of six guests with bursts, by policy", needs_gb=7.2),
    Bench("scale", "reporting, flushing and pre-zeroing guests of 1 to 8 GB, per GiB"),
    Bench("lockhold", "instructions while a zone's lock is held", accel="tcg"),
    Bench("zerobytes", "bytes zeroed, counted by the emulator", "allocation", "tcg"),
    Bench("hotpath", "instructions of the hot paths: compiled out, idle and active", accel="tcg"),
    Bench("refpage", "filling memory with a pattern: memset against refpage_create", both=False),
)
BENCHES: dict[str, Bench] = {bench.name: bench for bench in _ALL}
