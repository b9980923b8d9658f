# SPDX-License-Identifier: GPL-2.0
"""The benches: each measures the base kernel and ours side by side. Imports core to report."""

import importlib
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from lab.core.paths import REPO
from lab.report.results import Result

ACCELS = ("auto", "kvm", "tcg")
PROGRAMS = REPO / "guest" / "programs"
PARTS = tuple(sorted(file.stem for file in PROGRAMS.glob("*.sh")))


@dataclass(frozen=True)
class BenchOptions:
    """The options of a bench."""

    pairs: Annotated[int, Option(min=1, max=1000, help="Pairs of repetitions, by turns.")] = 10
    size_mb: Annotated[int, Option("--size", min=2, max=65536, help="MB the job allocates.")] = 256
    memory: Annotated[str, Option(help="Memory of each guest, such as 2G.")] = "2G"
    accel: Annotated[str, Option(help="auto, kvm or tcg.")] = "auto"
    base: Annotated[str, Option(help="The kernel to compare with.")] = "base"
    ours: Annotated[str, Option(help="The kernel measured: a variant or image.")] = "knownzero"
    qemu: Annotated[str, Option(help="knownzero, or stock: Debian's, with the daemon.")] = "knownzero"
    only: Annotated[str, Option(metavar="NAME,…", help="Of programs: only these.")] = ""

    @property
    def memory_mb(self) -> int:
        """Memory of a guest in MB."""
        return int(self.memory[:-1]) * {"G": 1024, "M": 1}[self.memory[-1]]


@dataclass(frozen=True)
class Bench:
    """A bench: a function of its name in ``module`` takes its figures, or ``measure`` of its own module.

    ``accel`` is the only accelerator it can use, if any; ``both`` is False for a bench that runs our kernel only.
    ``needs_gb`` of the machine's memory must be available. ``config``: a fragment for both kernels. ``parts``: the names
    that --only takes.
    """

    name: str
    sentence: str
    module: str = ""
    accel: str = ""
    both: bool = True
    needs_gb: float = 0.0
    config: str = ""
    parts: tuple[str, ...] = ()

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of its module. It is imported here: to list the benches loads nothing that boots guests."""
        module = importlib.import_module(f"lab.bench.{self.module or self.name.replace('-', '_')}")
        getattr(module, function)(*arguments)

    def measure(self, run: Any) -> None:
        """Take the figures with a ``Run`` of lab/bench/runner.py."""
        self.call(self.name if self.module else "measure", run)

    def run(self, options: BenchOptions) -> Result:
        """Measure; raises LabError when that is not possible."""
        result: Result = importlib.import_module("lab.bench.runner").measure(self, options)
        return result


_ALL = (
    Bench("thp", "the main job: 256 MB of huge pages, and the costs around it", "allocation"),
    Bench("order0", "the same memory in 4 KiB pages", "allocation"),
    Bench("hugetlb", "the same memory in huge pages of hugetlb, surplus and persistent", "allocation"),
    Bench("page-fault", "page faults at full speed, while free memory is reported"),
    Bench("deflate", "memory that is used again after it was in the balloon", "allocation"),
    Bench("device", "the balloon in a process of its own, vhost-user-balloon, against the one in QEMU"),
    Bench("both-ends", "a guest in a guest: bytes zeroed by the host and by the guest", accel="tcg"),
    Bench("host", "host memory that comes back when the guest frees"),
    Bench("churn", "memory allocated and freed all the time, at report delays of 2000, 250 and 50 ms"),
    Bench("prezero", "most of a guest's memory, zeroed before it is used"),
    Bench("fleet", "host memory of six guests with bursts of memory, by policy", needs_gb=7.2),
    Bench("programs", "real programs in a Debian", "", "tcg", True, 6.0, "programs", PARTS),
    Bench("scale", "the cost to report, flush and pre-zero guests of 1 to 8 GB, for each GiB", needs_gb=8.4),
    Bench("lockhold", "how long a zone's lock is held, in instructions", accel="tcg", needs_gb=8.4),
    Bench("zerobytes", "bytes zeroed, counted by the emulator", "allocation", "tcg"),
    Bench("hotpath", "instructions of the hot paths: compiled out, idle and active", accel="tcg"),
    Bench("refpage", "memory that starts with a pattern: memset against refpage_create", both=False),
)
BENCHES: dict[str, Bench] = {bench.name: bench for bench in _ALL}
