# SPDX-License-Identifier: GPL-2.0
"""The distribution's own kernel and QEMU: the unpatched partners of tests."""

import lzma
import os
import re
import shlex
import shutil
from pathlib import Path

from lab.core import lock, paths, run
from lab.core.errors import LabError
from lab.machine import debs, fetch, tools

KERNEL_PACKAGE = "linux-image-cloud-amd64"
# Folders of administration programs, which a user's PATH may lack.
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
MODULES = ("virtio_pci", "virtio_console", "virtio_balloon", "virtio_blk")


def kernel() -> tuple[Path, list[Path]]:
    """Debian's cloud kernel of the machine's release: the image, and modules in load order."""
    image, folder = _kernel_files()
    release = image.name.removeprefix("vmlinuz-")
    roots = [
        root
        for place in ("lib", "usr/lib")
        if (root := folder / place / "modules" / release).is_dir()
    ]
    return image, modules(roots[0]) if roots else []


def cloud_config() -> Path:
    """Debian's configuration of the cloud kernel of the same version as our source."""
    wanted = fetch.base("linux")
    package = f"linux-config-{wanted.series}"
    folder = debs.unpacked(package, suite=wanted.suite) / "usr" / "src" / package
    packed = folder / "config.amd64_none_cloud-amd64.xz"
    if not packed.is_file():
        why = f"{packed} is missing"
        raise LabError(f"{package} has no cloud configuration", why, "name a .config with --config")
    plain = folder / f"config-{wanted.series}-cloud-amd64"
    lock.write_if_changed(plain, lzma.decompress(packed.read_bytes()))
    return plain


def _kernel_files() -> tuple[Path, Path]:
    name = f"{KERNEL_PACKAGE.removesuffix('-cloud-amd64')}-[0-9]*-cloud-amd64"
    known = sorted(one.name for one in paths.sub("debs").glob(name))
    found = known[-1:] or debs.depends(KERNEL_PACKAGE)
    if not (package := next((name for name in found if name.startswith("linux-image-")), "")):
        fix = "check the machine's release"
        raise LabError(f"{KERNEL_PACKAGE} depends on no kernel image", "its record names none", fix)
    folder = debs.unpacked(package)
    if not (images := sorted((folder / "boot").glob("vmlinuz-*"))):
        raise LabError(
            f"{package} has no kernel image", f"unpacked in {folder}", "remove that folder"
        )
    return images[0], folder


def depmod() -> str:
    tools.need("stock kernel")
    return shutil.which("depmod", path=SBIN) or "depmod"


def modules(root: Path) -> list[Path]:
    """The module files that MODULES need, dependencies first, uncompressed."""
    top, release, program = root.parents[2], root.name, Path(depmod())
    if not (root / "modules.dep.bin").is_file():
        run.output(
            [program, "-b", top, release], "cannot index the stock kernel's modules", "install kmod"
        )
    # A module that this kernel has built in, or lacks, is left out.
    options = f"-C /dev/null -d {top} -S {release} -D -a"
    listed = run.ask([program.with_name("modprobe"), *options.split(), *MODULES]).stdout
    files = re.findall(r"^insmod (\S+)", listed, re.MULTILINE)
    return [_plain(Path(file)) for file in dict.fromkeys(files)]


def _plain(module: Path) -> Path:
    """A module without compression: the guest cannot unpack it."""
    if module.suffix == ".ko":
        return module
    target = module.with_suffix("")
    if not target.is_file():
        if module.suffix == ".xz":
            data = lzma.decompress(module.read_bytes())
        else:
            text = run.output(["zstd", "-dcq", module], f"cannot unpack {module}", "install zstd")
            data = text.encode(errors="surrogateescape")
        lock.write_atomically(target, data)
    return target


# The package, and the program in it.
QEMUS = {
    "x86_64": ("qemu-system-x86", "qemu-system-x86_64"),
    "arm64": ("qemu-system-arm", "qemu-system-aarch64"),
}


def qemu(arch: str = "x86_64", suite: str = "") -> Path:
    """Debian's QEMU, unpatched, of a suite.

    By default the newest of the one that has the kernel's source.
    """
    package, program = QEMUS[arch]
    folder = debs.with_dependencies(package, f"usr/bin/{program}", suite or _suites())
    words = [*debs.loader(folder), str(folder / "usr" / "bin" / program)]
    # QEMU takes modules, firmware and configuration from the machine's /usr and /etc, except below
    # a folder "qemu-bundle" beside the program that runs: here the loader. The link is relative,
    # so that another user finds the files where the folder is mounted.
    bundle = Path(words[0]).parent / "qemu-bundle"
    target = Path(os.path.relpath(folder, bundle.parent))
    if not bundle.is_symlink() or bundle.readlink() != target:
        new = bundle.with_name(f"qemu-bundle.{os.getpid()}")
        new.symlink_to(target)
        new.replace(bundle)
    clean = "unset QEMU_MODULE_DIR LD_PRELOAD LD_LIBRARY_PATH"
    script = f'#!/bin/sh\n{clean}\nexec {shlex.join(words)} "$@"\n'
    lock.write_if_changed(folder / program, script.encode(), 0o755)
    return folder / program


def _suites() -> str:
    """The suites of the default QEMU: Debian's stable and its backports."""
    backports = fetch.base("linux").suite
    return f"{backports.removesuffix('-backports')} {backports}"


def find_qemu() -> Path | None:
    """The default QEMU of ``qemu`` if the cache has it; downloads nothing."""
    package, _ = QEMUS["x86_64"]
    return qemu() if debs.place(package, _suites()).is_dir() else None
