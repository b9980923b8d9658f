# SPDX-License-Identifier: GPL-2.0
"""The benches by name."""

from lab.bench import (
    allocation,
    boot,
    both_ends,
    device,
    fleet,
    hotpath,
    init_on_alloc,
    life,
    life_programs,
    lockhold,
    page_fault,
    prezero,
    programs,
    refpage,
)
from lab.bench.plan import Bench, Kernel
from lab.boot import nested
from lab.build import daemon

# The base kernel with a patch (linux/measure) that leaves the memory of large mappings as it is.
FLOOR = {"floor": Kernel("floor")}
OFF = {"off": Kernel("off")}
OUTER = {
    "outer_base": Kernel("base", config=nested.CONFIG),
    "outer_ours": Kernel("knownzero", config=nested.CONFIG),
}

_ALL = (
    Bench(
        "boot",
        "a fresh guest: what it knows of its memory, and its first program",
        boot.measure,
        user_mode=True,
        daemon=True,
    ),
    Bench(
        "thp",
        "the main job: 256 MB of huge pages",
        allocation.thp,
        kernels=FLOOR,
        native=True,
        debian=True,
        older=True,
    ),
    Bench(
        "order0",
        "the same memory in 4 KiB pages",
        allocation.order0,
        kernels=FLOOR,
        native=True,
        older=True,
    ),
    Bench(
        "hugetlb",
        "the same memory in hugetlb pages, surplus and persistent",
        allocation.hugetlb,
        kernels=FLOOR,
        native=True,
    ),
    Bench(
        "page-fault",
        "page faults while free memory is reported",
        page_fault.measure,
        native=True,
        debian=True,
    ),
    Bench(
        "device",
        "vhost-user-balloon against the balloon in QEMU",
        device.measure,
        daemon=True,
        first=daemon.build_punch,
    ),
    Bench(
        "both-ends",
        "a guest in a guest: bytes zeroed by the host and by the guest",
        both_ends.measure,
        accel="tcg",
        kernels=OUTER,
    ),
    Bench(
        "prezero",
        "free memory zeroed before it is used",
        prezero.measure,
        user_mode=True,
        native=True,
    ),
    Bench(
        "init-on-alloc",
        "small allocations with init_on_alloc=1, distributions' default",
        init_on_alloc.measure,
        native=True,
    ),
    Bench(
        "life",
        "a guest's life: boot, programs, idle, park, save, restore, burst",
        life.measure,
        native=True,
        needs_gb=7.2,
        plugins=("zerobytes",),
        parts=life.PHASES,
        emulated_parts=life.NOT_NATIVE,
        disk=programs.disk,
        disk_parts=life_programs.PHASES,
        disk_config=life_programs.CONFIG,
    ),
    Bench(
        "fleet",
        "host memory of six guests with bursts, by policy",
        fleet.measure,
        needs_gb=7.2,
        debian=True,
    ),
    Bench(
        "programs",
        "real programs in a Debian",
        programs.measure,
        accel="tcg",
        native=True,
        needs_gb=9.0,
        debian=True,
        config="programs",
        plugins=("zerobytes",),
        parts=programs.NAMES,
        emulated_parts=programs.NOT_NATIVE,
        disk=programs.disk,
    ),
    Bench(
        "lockhold",
        "instructions while a zone's lock is held",
        lockhold.measure,
        accel="tcg",
        needs_gb=8.4,
        plugins=("lockhold",),
    ),
    Bench(
        "hotpath",
        "the hot paths: instructions compiled out, idle and active; with --accel pvm, time",
        hotpath.measure,
        accel="tcg",
        kernels=FLOOR | OFF,
        plugins=("functions",),
        native=True,
    ),
    Bench(
        "refpage",
        "filling memory with a pattern: memset against refpage_create",
        refpage.measure,
        both=False,
        native=True,
    ),
)
BENCHES: dict[str, Bench] = {bench.name: bench for bench in _ALL}
