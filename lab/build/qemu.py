# SPDX-License-Identifier: GPL-2.0
"""QEMU, built outside its source and kept in the cache by content."""

import functools
import shutil
import sys
from pathlib import Path

from lab.build.images import Recipe, compiler, digest, jobs
from lab.core import lock, run
from lab.core.errors import UsageError
from lab.core.run import Argv
from lab.machine import debs, fetch, tools
from lab.patches import parts

PROGRAM = Path("usr/bin/qemu-system-x86_64")
QEMU_VARIANTS = ("base", "knownzero")
QEMU_RECIPE = "2"  # change it when the way QEMU is built changes
# Firmware that Debian's source leaves out: packages, and their folders.
FIRMWARE = {"seabios": "usr/share/seabios", "ipxe-qemu": "usr/lib/ipxe/qemu"}
# Debian's source has no blobs; debug information takes a fifth of the time to compile.
WITHOUT = ("werror", "download", "docs", "debug-info", "install-blobs")
WITH = ("tcg", "kvm", "plugins", "fdt=system", "trace-backends=log", "vhost-user")
WITH += tuple(name for feature in tools.FEATURES for name in feature["enable"])
VECTOR = ("--enable-avx2", "--enable-avx512bw")  # for 10.0: later QEMU finds them by itself
QEMU_OPTIONS = (
    "--target-list=x86_64-softmmu",
    "--without-default-features",
    "--prefix=/usr",
    "--firmwarepath="
    + ":".join(["/usr/share/qemu", *(f"/{place}" for place in FIRMWARE.values())]),
    *(f"--enable-{name}" for name in WITH),
    *VECTOR,
    *(f"--disable-{name}" for name in WITHOUT),
)


def qemu_key(variant: str, source: fetch.Source) -> str:
    if variant not in QEMU_VARIANTS:
        why, fix = "no QEMU has this name", f"use {', '.join(QEMU_VARIANTS)}"
        raise UsageError(f"Bad --variant: {variant}", why, fix)
    inputs = [QEMU_RECIPE, source.key, compiler(), *QEMU_OPTIONS]
    if variant != "base":
        inputs.append(parts.get("qemu").key())
    return digest(inputs)


def _recipe(variant: str) -> Recipe:
    def make(tree: Path, obj: Path, log: Path) -> None:
        make_qemu(tree, obj, log, [PROGRAM.name])

    key = functools.partial(qemu_key, variant)
    return Recipe("qemu", variant, variant, str(PROGRAM), key, make, _publish)


def find_qemu() -> Path | None:
    return _recipe("knownzero").find()


def qemu_object_dir(variant: str, source: fetch.Source) -> Path:
    """The folder that QEMU is compiled in; its qtests are built and run there too."""
    return _recipe(variant).object_dir(source)


def build_qemu(variant: str = "knownzero") -> Path:
    """qemu-system-x86_64, built when the cache lacks it; its firmware stands beside it."""
    return _recipe(variant).build()


def make_qemu(tree: Path, obj: Path, log: Path, targets: list[str]) -> None:
    """Configure when the recipe changed, then build the targets in ``obj``."""
    what = "QEMU does not build"
    fix = "correct the first error above (the log has the rest), then run it again"
    stamp = obj / ".configured"
    recipe = digest([QEMU_RECIPE, compiler(), str(tree), sys.executable, *QEMU_OPTIONS])
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != recipe:
        shutil.rmtree(obj, ignore_errors=True)
        obj.mkdir(parents=True)
        known = (tree / "scripts" / "meson-buildoptions.sh").read_text(encoding="utf-8")
        options = [one for one in QEMU_OPTIONS if one not in VECTOR or one in known]
        argv: Argv = [tree / "configure", f"--python={sys.executable}", *options]
        advice = "run `kz doctor`: it names missing packages; the log says the rest"
        run.logged(argv, log, "QEMU cannot be configured", advice, cwd=obj)
        stamp.write_text(recipe, encoding="utf-8")
    ninja = Path(sys.executable).parent / "ninja"
    run.logged([ninja, "-C", obj, f"-j{jobs()}", *targets], log, what, fix, pass_fds=lock.held())
    make_option_roms(tree, obj / "optionrom", log)


def make_option_roms(tree: Path, folder: Path, log: Path) -> None:
    """Build the ROMs that load kernels; configure leaves them out without a 32-bit libgcc."""
    folder.mkdir(exist_ok=True)
    config = f"TOPSRC_DIR={tree}\nCC=cc\nOBJCOPY=objcopy\nPYTHON={sys.executable}\n"
    lock.write_if_changed(folder / "config.mak", config.encode())
    argv: Argv = ["make", "-C", folder, "-f", tree / "pc-bios" / "optionrom" / "Makefile", "all"]
    run.logged(argv, log, "QEMU's option ROMs do not build", "read the log")


def _publish(obj: Path, work: Path) -> dict[str, object]:
    data = work / "usr" / "share" / "qemu"
    for folder in ((work / PROGRAM).parent, data):
        folder.mkdir(parents=True)
    shutil.copy2(obj / PROGRAM.name, work / PROGRAM)
    for rom in sorted((obj / "optionrom").glob("*.bin")):
        shutil.copy2(rom, data / rom.name)
    shutil.copytree(obj / "qemu-bundle" / "usr" / "share" / "qemu" / "keymaps", data / "keymaps")
    for package, place in FIRMWARE.items():
        shutil.copytree(debs.unpacked(package) / place, work / place)
    return {"compiler": compiler()}
