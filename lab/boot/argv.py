# SPDX-License-Identifier: GPL-2.0
"""The command line of QEMU or User-Mode Linux. Reads no file, builds nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.boot.spec import BootSpec

# The first oops ends the guest, so that no run waits for its timeout.
ENDS = "panic=-1 oops=panic"
# Emulation on a busy machine loses the ticks that the kernel's timer check counts; KVM skips the
# check anyway.
APPEND = f"console=ttyS0 {ENDS} mitigations=off no_timer_check"
# An emulated counter jumps when its thread waits: do not watch it. Delays as at 3 GHz and 250 Hz.
# An RCU section of a preempted nice task (khugepaged) lasts many times as long as on hardware.
APPEND_TCG = "tsc=reliable lpj=12000000 rcupdate.rcu_cpu_stall_timeout=100"
# Under PVM, kernel and programs need page tables of their own, and each change of the timer traps.
APPEND_PVM = "pti=on nohz=off"
APPEND_ARM64 = f"console=ttyAMA0 {ENDS} mitigations=off"
APPEND_UM = f"con=null con0=null,fd:1 console=tty0 earlyprintk {ENDS}"
BARE = ("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot")
VIRTIO_ID_BALLOON = 5
# The daemon's front end in the patched QEMU, and in any QEMU from 10.1 on.
FRONT_END = "vhost-user-balloon-pci"
GENERIC = (
    f"vhost-user-test-device-pci,virtio-id={VIRTIO_ID_BALLOON},num_vqs=5,vq_size=128,config_size=24"
)
# BootSpec.shared_memory: a file in a tmpfs with huge pages, mounted for this QEMU alone by root of
# a user namespace. A memfd gets huge pages only where the administrator has enabled them.
HUGE, MOUNT = "huge", 'mount -t tmpfs -o huge=always none /dev/shm && exec "$0" "$@"'
WITH_HUGE = ("unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT)
# More options of a memory backend with pages of the host's pool.
POOL = "hugetlb=on,hugetlbsize=2M"
UM_LINES = ("ctl", "out", "err", "in")  # in the order of User-Mode Linux's serial lines


@dataclass(frozen=True)
class Images:
    """The files that a BootSpec stands for on this machine, and the accelerator that works."""

    kernel: Path
    accel: str  # kvm, pvm, tcg or um
    qemu: Path | None = None
    modules: tuple[Path, ...] = ()  # that the kernel must load
    front_end: str = ""  # of the daemon: QEMU's device and its properties
    tsc_khz: int = 0  # of the machine's time stamp counter; 0: the guest measures it
    reason: str = ""  # for the accelerator
    archive: Path | None = None  # the programs of the guest's initramfs
    daemon: Path | None = None  # the program of the device daemon


@dataclass(frozen=True)
class Ends:
    """Files and sockets of one run.

    ``sockets`` are file descriptors by the name of their channel.
    """

    initrd: Path
    console: Path
    sockets: Mapping[str, int]
    daemon: Path | None = None  # the socket of the vhost-user daemon
    interactive: bool = False
    huge_pages: bool = False  # the host's pool has the guest's memory


def make(spec: BootSpec, images: Images, ends: Ends) -> list[str]:
    return _um(spec, images, ends) if spec.arch == "um" else _qemu(spec, images, ends)


def cpu(accel: str, arch: str = "x86_64", mte: bool = False) -> list[str]:
    """The accelerator and the processor model; ``mte``: an arm64 processor with memory tags.

    The emulated x86 processor lacks ERMS: QEMU emulates ``rep stosb`` byte by byte, and zeroing
    would seem slower.
    """
    if arch == "arm64":
        # pauth-impdef: pointer authentication as specified takes half of the time.
        return ["-accel", "tcg", "-cpu", "max,pauth-impdef=on" if mte else "cortex-a57"]
    if accel == "kvm":
        return ["-accel", "kvm", "-cpu", "host"]
    if accel == "pvm":  # on AMD, kvm_pvm offers arch-capabilities, and then refuses to set its MSR
        return ["-accel", "kvm", "-cpu", "host,-arch-capabilities"]
    return ["-accel", "tcg", "-cpu", "qemu64,+pdpe1gb"]


def _append(spec: BootSpec, images: Images) -> str:
    words = APPEND_ARM64 if spec.arch == "arm64" else APPEND
    if spec.arch == "x86_64" and images.accel == "tcg":
        words += f" {APPEND_TCG}"
        # With -icount the counter is a virtual clock of 1 GHz. Without, a kernel on a busy machine
        # that measures the counter with emulated timers may be wrong by a factor of six.
        if images.tsc_khz and "-icount" not in spec.extra_qemu:
            words += f" tsc_early_khz={images.tsc_khz}"
    if images.accel == "pvm":
        words += f" {APPEND_PVM}"
    return f"{words} {spec.append}".strip()


def _value(path: Path) -> str:
    """A path as the value of an option of QEMU, where a comma ends the value."""
    return str(path).replace(",", ",,")


def _machine(spec: BootSpec) -> str:
    if spec.arch != "arm64":
        return "q35"
    return "virt,mte=on" if spec.mte else "virt"


def _qemu(spec: BootSpec, images: Images, ends: Ends) -> list[str]:
    argv = [*WITH_HUGE] if spec.shared_memory == HUGE else []
    argv += [
        str(images.qemu),
        *BARE,
        "-machine",
        _machine(spec),
        *cpu(images.accel, spec.arch, spec.mte),
    ]
    argv += ["-m", spec.memory, "-smp", str(spec.cpus), "-kernel", str(images.kernel)]
    argv += ["-initrd", str(ends.initrd), "-append", _append(spec, images)]
    argv += [
        "-chardev",
        f"file,id=kzconsole,path={_value(ends.console)}",
        "-serial",
        "chardev:kzconsole",
    ]
    argv += ["-device", "virtio-serial-pci,id=kzserial"]
    for name, fd in ends.sockets.items():
        argv += ["-chardev", f"socket,id=kz{name},fd={fd}"]
        if name == "qmp":
            argv += ["-mon", "chardev=kzqmp,mode=control"]
        else:
            argv += ["-device", f"virtserialport,chardev=kz{name},name=kz.{name}"]
    if ends.interactive:
        argv += ["-chardev", "stdio,id=kztty,signal=off", "-device", "virtconsole,chardev=kztty"]
    if ends.daemon or ends.huge_pages:
        more = POOL if ends.huge_pages else spec.shared_memory
        kind = "memfd" + (f",{more}" if more else "")
        if more == HUGE:
            kind = "file,mem-path=/dev/shm,align=2M"
        argv += ["-object", f"memory-backend-{kind},id=kzmemory,size={spec.memory},share=on"]
        argv += ["-machine", "memory-backend=kzmemory"]
    if ends.daemon:
        # Two processes share the memory. The patched QEMU connects again when the daemon restarts;
        # the generic device fails at once with this option, since it does not wait for the
        # connection.
        again = ",reconnect-ms=100" if images.front_end == FRONT_END else ""
        argv += ["-chardev", f"socket,id=kzballoon,path={_value(ends.daemon)}{again}"]
        argv += ["-device", f"{images.front_end},chardev=kzballoon"]
    for device in spec.qemu_devices():
        argv += ["-device", device]
    return argv + spec.extra_qemu


def _um(spec: BootSpec, images: Images, ends: Ends) -> list[str]:
    argv = [str(images.kernel), f"mem={spec.memory}", f"initrd={ends.initrd}", *APPEND_UM.split()]
    for number, name in enumerate(name for name in UM_LINES if name in ends.sockets):
        argv.append(f"ssl{number}=fd:{ends.sockets[name]},fd:{ends.sockets[name]}")
    if ends.daemon:
        argv.append(f"virtio_uml.device={ends.daemon}:{VIRTIO_ID_BALLOON}")
    return argv + spec.append.split()
