# SPDX-License-Identifier: GPL-2.0
"""The demo: the main job on what an operator would run.

Debian's QEMU, the daemon, and one kernel, which has no drivers but those that the demo uses.
Without: the same with a device that does not offer bit 6.
"""

from lab.bench.jobs import NO_SOURCE, TOUCHED, Job, allocate, check_huge
from lab.bench.plan import MEMORY, NATIVE, SIZE, Bench, Images, Needs, Plan, kernels_of
from lab.bench.runner import Run
from lab.bench.session import Wanted, shared_memory
from lab.boot import ahead, initramfs
from lab.boot.spec import DAEMON
from lab.build import daemon, qemu
from lab.core.progress import step
from lab.machine import stock
from lab.report import summary

PAIRS = 6  # fewer cannot reach p < 0.05
# The device of each side, in the daemon and in the lab's QEMU.
DEVICES = {
    "base": (
        f"{DAEMON},stats-interval=0,device-init-reported=off",
        "virtio-balloon-pci,free-page-reporting=on,x-device-init-reported=off",
    ),
    "ours": (f"{DAEMON},stats-interval=0", "virtio-balloon-pci,free-page-reporting=on"),
}
# The mode of the job, and its pages.
JOBS = (("populate", "thp"), ("touch_all", "thp"), ("touch_all", "nothp"))
NAMES = {"thp": "thp.{mode}", "nothp": "order0.{mode}"}
SAME = (
    "Both guests run the same kernel. The device of the one without does not offer feature bit 6: "
    "its host takes the same memory back, and the guest zeroes it again. "
    "`./kz bench thp` compares with the kernel without the series, and with the floor: a kernel "
    "that does not zero. A kernel without a source of zeros does not count what it zeroes: these "
    "bytes are 2 MiB for each huge page that the job faulted in, and 4 KiB for each other fault."
)


def build(plan: Plan) -> Images:
    """Download and build side by side what the cache lacks."""
    with step("downloads and builds"):
        ahead.run(plan.options.accel)
    on_stock = ahead.on_stock_qemu()
    initramfs.base_archive()
    return Images(
        stock.qemu() if on_stock else qemu.build_qemu(),
        kernels_of(plan),
        daemon=daemon.program(ahead.PROFILE) if on_stock else None,
    )


def measure(run: Run) -> None:
    """The job in both guests by turns, and the memory that they leave on the host."""
    run.sides = list(summary.SIDES)
    run.note(SAME, TOUCHED)
    wanted = []
    for side, (with_daemon, in_qemu) in DEVICES.items():
        spec = run.spec("ours", devices=[in_qemu])
        if run.images.daemon:
            spec = run.spec("ours", devices=[with_daemon], shared_memory=shared_memory())
        wanted.append(Wanted(side, spec, kernel=NO_SOURCE if side == "base" else "ours"))
    with run.guests(wanted) as sides:
        for mode, pages in JOBS:
            job = Job(NAMES[pages], mode, pages, {"mode": mode}, twice=run.native)
            found = allocate(run, sides, job)
            if pages == "thp":
                check_huge(run, found)
        left = {side.name: [float(side.settle())] for side in sides}
    run.add("host.resident_after_free_bytes", (left["base"], left["ours"]))


DEMO = Bench(
    "demo",
    "the main job on what an operator would run",
    measure,
    needs=Needs(base=False, config=ahead.CONFIG),
    takes=(NATIVE,),
    fixed=(SIZE, MEMORY),
)
