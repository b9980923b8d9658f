# SPDX-License-Identifier: GPL-2.0
"""A disk with a Debian of the machine's release and the project's packages, for guests to boot.

mmdebstrap makes it, without root where users have subordinate ids; maintainer scripts run in its
chroot.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.boot.spec import BootSpec
from lab.core import lock, paths, progress, run
from lab.core.errors import LabError
from lab.machine import apt, debs, stock, tools

RECIPE = "1"
KEEP = 4
# Besides the essential ones: a system that boots, and the hooks of a kernel's package.
PACKAGES = ("apt", "systemd-sysv", "udev", "dbus", "kmod", "linux-base", "initramfs-tools")
ROOT, JOB = "kz-root", "kz-job"  # file systems, by their labels
DISK = "3G"  # what the root file system may grow to; the file has holes
TIMEOUT = 1800.0
# Emulation on a busy machine turns seconds into minutes.
PATIENCE = "systemd.default_timeout_start_sec=900 systemd.default_device_timeout_sec=900"
APPEND = f"root=LABEL={ROOT} rw systemd.show_status=0 systemd.getty_auto=no {PATIENCE}"
FSTAB = f"LABEL={ROOT} / ext4 defaults 0 1\nLABEL={JOB} /{JOB} ext4 ro 0 0\n"
# Type=simple: the system is up as soon as this has been started.
UNIT = f"""[Unit]
Description=Job of the lab
RequiresMountsFor=/{JOB}

[Service]
Type=simple
ExecStart=/bin/sh /{JOB}/run
Environment=PATH=/{JOB}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root

[Install]
WantedBy=multi-user.target
"""
# The job of guest/init.c in guests without a distribution.
RUNNER = """ports=/dev/virtio-ports
for name in ctl out err; do
    until [ -e $ports/kz.$name ]; do sleep 0.1; done
done
exec 3>$ports/kz.ctl
echo "ready 0" >&3
{command} </dev/null >$ports/kz.out 2>$ports/kz.err
status=$?
echo "taint $(cat /proc/sys/kernel/tainted)" >&3
echo "exit $status" >&3
systemctl --no-block poweroff
"""


@dataclass(frozen=True)
class System:
    """A disk with a Debian, and the kernel and initramfs of the package that is installed there."""

    disk: Path
    kernel: Path
    initrd: Path

    @property
    def release(self) -> str:
        """The output of ``uname -r`` in it."""
        return self.kernel.name.removeprefix("vmlinuz-")


def field(package: Path, name: str) -> str:
    """A field of a package's control file; empty when it has none."""
    argv: run.Argv = ["dpkg-deb", "-f", package, name]
    return run.output(argv, f"{package} is no package", "make it again with kz package").strip()


def zeropages(folder: Path) -> Path:
    """The package of tools/zeropages."""
    for copied in ("tools/zeropages", "LICENSES"):
        shutil.copytree(paths.REPO / copied, folder / "source" / copied)
    argv: run.Argv = ["make", "-C", folder / "source/tools/zeropages", "deb", f"OUT={folder}"]
    run.output(argv, "zeropages cannot be packaged", "read the lines above")
    return next(folder.glob("zeropages_*.deb"))


def needs(packages: Sequence[Path]) -> list[str]:
    """The dependencies of packages, first alternatives only, without the packages themselves."""
    own = {field(package, "Package") for package in packages}
    found = set()
    for package in packages:
        for part in field(package, "Depends").split(","):
            if name := re.split(r"[\s(|:]", part.strip(), maxsplit=1)[0]:
                found.add(name)
    return sorted(found - own)


def _key(suite: str, versions: dict[str, str]) -> str:
    text = json.dumps([RECIPE, suite, sorted(versions.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def has_lists(source: apt.PrivateApt) -> bool:
    """Whether the suite's lists were fetched once, however old they are."""
    return any(file.is_file() for file in (source.root / "lists").glob("*_Packages*"))


def closure(source: apt.PrivateApt, packages: list[str]) -> dict[str, str]:
    """The packages of a system with the essential ones and these: package -> version."""
    alone = ["--simulate", "-o", "Dir::State::status=/dev/null", "--no-install-recommends"]
    argv = source.argv("apt-get", "install", "-q", *alone, "?essential", *packages)
    what = f"Debian {source.suite} cannot install {', '.join(packages)}"
    text = run.output(argv, what, "check these names; they come from the packages to be installed")
    return dict(re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", text, re.MULTILINE))


def base(more: Sequence[str] = ()) -> Path:
    """A tar archive of a Debian with PACKAGES and ``more``; made when the cache lacks it.

    Its key is the release and the versions of all packages, which packages.json beside it names.
    """
    tools.need("debian")
    source = apt.PrivateApt(apt.codename())
    wanted = sorted({*PACKAGES, *more})

    def place() -> tuple[Path, dict[str, str]]:
        versions = closure(source, wanted)
        return paths.sub("debian") / f"{source.suite}-{_key(source.suite, versions)}", versions

    if has_lists(source):
        folder, _ = place()
        if folder.is_dir():
            with contextlib.suppress(OSError):
                os.utime(folder)
            return folder / "root.tar"
    with lock.locked("debian"):
        source.update()
        folder, versions = place()
        if folder.is_dir():
            return folder / "root.tar"
        log = paths.log_file("debian-base")
        what = f"installing {len(versions)} packages of Debian {source.suite} into a folder"
        with progress.step(what, log), lock.new_directory(folder) as work:
            argv = [
                "--variant=apt",
                "--skip=output/dev",
                f"--include={','.join(wanted)}",
                source.suite,
            ]
            _mmdebstrap([*argv, work / "root.tar", source.root / "mirror.sources"], log)
            (work / "packages.json").write_text(
                json.dumps(versions, indent=1) + "\n", encoding="utf-8"
            )
        _prune()
    return folder / "root.tar"


def _prune(keep: int = KEEP) -> None:
    """Remove the systems that were unused longest, and left-over work; none of today."""
    for number, old in enumerate(
        sorted(paths.sub("debian").iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
    ):
        if (
            number >= keep or old.name.startswith(".")
        ) and time.time() - old.stat().st_mtime > 86400:
            shutil.rmtree(old, ignore_errors=True)


def install(packages: Sequence[Path], folder: Path, more: Sequence[str] = ()) -> System:
    """Install packages with apt; the disk, the kernel and its initramfs go to ``folder``.

    Their dependencies, and ``more`` packages by name, come from the machine's mirror. One of them
    is a kernel. Raises LabError, with apt's output, when a package cannot be installed, or the
    system has no kernel.
    """
    packages = [package.resolve() for package in packages]
    start = base([*needs(packages), *more])
    log = paths.log_file("debian-install")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".debian-", dir=paths.sub("work")) as name,
        progress.step("installing " + ", ".join(package.name for package in packages), log),
    ):
        work = Path(name)
        files = {
            "fstab": FSTAB,
            "kz-job.service": UNIT,
            "hostname": "knownzero\n",
            "machine-id": "6" * 32,
        }
        for file, text in files.items():
            (work / file).write_text(text, encoding="utf-8")
        inside = 'chroot "$1" env DEBIAN_FRONTEND=noninteractive'
        hooks = [
            # mmdebstrap copies these: the user in the chroot may not read the files of this user.
            _special("copy-in", *packages, "/root"),
            f"{inside} sh -c 'apt-get install --yes --no-install-recommends /root/*.deb'",
            f"{inside} sh -c 'dpkg --audit; test -z \"$(dpkg --audit)\"; rm /root/*.deb'",
            _special("copy-in", work / "fstab", work / "hostname", work / "machine-id", "/etc"),
            _special("copy-in", work / "kz-job.service", "/etc/systemd/system"),
            f"{inside} systemctl enable kz-job.service",
        ]
        argv = ["--variant=custom", "--skip=setup,update,cleanup,output/dev"]
        # Only root may unpack devices.
        argv += ["--setup-hook=" + _special("tar-in", start, "/"), '--setup-hook=mkdir "$1/dev"']
        argv += [f"--customize-hook={hook}" for hook in hooks]
        _mmdebstrap([*argv, "", work / "root.tar"], log)
        return _published(work, folder, log)


def _published(work: Path, folder: Path, log: Path) -> System:
    """The disk of work/root.tar, and its kernel."""
    tree = work / "tree"
    tree.mkdir()
    argv = [
        *_fakeroot(work, "-s"),
        "tar",
        "-x",
        "-p",
        "--numeric-owner",
        "-C",
        tree,
        "-f",
        work / "root.tar",
    ]
    run.logged(
        argv, log, "cannot unpack the installed system", "free some space, then run it again"
    )
    (work / "root.tar").unlink()
    (tree / "dev").mkdir()
    kernels = sorted((tree / "boot").glob("vmlinuz-*"))
    initrds = [
        kernel.with_name(kernel.name.replace("vmlinuz-", "initrd.img-", 1)) for kernel in kernels
    ]
    if len(kernels) != 1 or not initrds[0].is_file():
        raise LabError(
            "the installed system cannot be booted",
            f"/boot has {sorted(file.name for file in (tree / 'boot').iterdir())}",
            f"install one kernel, with hooks that make its initramfs (log: {log})",
        )
    kernel, initrd = kernels[0], initrds[0]
    for file in (kernel, initrd):
        shutil.copyfile(file, folder / file.name)
    _file_system(tree, folder / "root.ext4", ROOT, DISK, log, _fakeroot(work, "-i"))
    return System(folder / "root.ext4", folder / kernel.name, folder / initrd.name)


def boot_spec(system: System, command: list[str], folder: Path, **more: Any) -> BootSpec:
    """A guest that boots the disk and runs a command as a systemd service.

    See BootSpec for ``more``.

    The files of ``add`` are in the command's PATH. The disk does not keep what the guest writes.
    ``folder`` gets a disk with the job.
    """
    add: list[tuple[Path, str]] = more.pop("add", [])
    job = folder / "job.ext4"
    with tempfile.TemporaryDirectory(prefix=".job-", dir=paths.sub("work")) as name:
        tree = Path(name)
        tree.chmod(0o755)
        (tree / "bin").mkdir()
        for file, place in add:
            shutil.copyfile(file, tree / "bin" / (place or file.name))
            (tree / "bin" / (place or file.name)).chmod(0o755)
        (tree / "run").write_text(RUNNER.format(command=shlex.join(command)), encoding="utf-8")
        size = sum(file.stat().st_size for file in tree.rglob("*") if file.is_file())
        _file_system(tree, job, JOB, f"{(size >> 20) + 16}M", paths.log_file("debian-job"), [])
    drives = []
    for number, (disk, mode) in enumerate(((system.disk, "snapshot=on"), (job, "read-only=on"))):
        # A comma in a path is written twice.
        place = str(disk).replace(",", ",,")
        drives += ["-drive", f"if=none,id=kzdisk{number},format=raw,{mode},file={place}"]
        drives += ["-device", f"virtio-blk-pci,drive=kzdisk{number}"]
    return BootSpec(
        kernel=system.kernel,
        initrd=system.initrd,
        command=command,
        append=f"{APPEND} {more.pop('append', '')}".strip(),
        timeout=more.pop("timeout", TIMEOUT),
        extra_qemu=[*drives, *more.pop("extra_qemu", [])],
        **more,
    )


def _special(hook: str, *arguments: str | Path) -> str:
    """A hook of mmdebstrap itself."""
    return " ".join([hook, *(shlex.quote(str(argument)) for argument in arguments)])


def _mmdebstrap(arguments: Sequence[str | Path], log: Path) -> None:
    program = debs.unpacked("mmdebstrap") / "usr" / "bin" / "mmdebstrap"
    # As root, this mode has namespaces of mounts and processes; for other users mmdebstrap finds a
    # mode.
    mode = "unshare" if os.geteuid() == 0 else "auto"
    run.logged(
        ["perl", program, f"--mode={mode}", *arguments],
        log,
        "mmdebstrap cannot make the Debian that is to be booted",
        "read the log; users other than root need ranges in /etc/subuid and /etc/subgid, and "
        "uidmap",
        env={**os.environ, "PATH": stock.SBIN},
    )


def _fakeroot(work: Path, option: str) -> list[str | Path]:
    """The start of a command that keeps the archive's owners of files; ``option``: -s, then -i."""
    if os.geteuid() == 0:
        return []
    return ["fakeroot", option, work / "owners", "--"]


def _file_system(
    tree: Path, image: Path, label: str, size: str, log: Path, start: Sequence[str | Path]
) -> None:
    """An ext4 image of a folder; ``size`` with a unit of mke2fs."""
    with lock.new_file(image) as part:
        mke2fs = shutil.which("mke2fs", path=stock.SBIN) or "mke2fs"
        argv = [
            *start,
            mke2fs,
            "-q",
            "-F",
            "-t",
            "ext4",
            "-m",
            "0",
            "-L",
            label,
            "-d",
            tree,
            part,
            size,
        ]
        run.logged(
            argv, log, f"cannot make the file system {label}", "free some space, then run it again"
        )
