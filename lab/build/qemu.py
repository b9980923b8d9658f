# SPDX-License-Identifier: GPL-2.0
"""QEMU, built outside its source and kept in the cache by content."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lab.build.images import clean_environment, compiler, digest, image_path, jobs, prune_images
from lab.core import lock, paths, progress, run
from lab.core.errors import UsageError
from lab.core.run import Argv
from lab.machine import debs, fetch, tools
from lab.series import apply, parts

QEMU_VARIANTS = ("base", "knownzero")
QEMU_RECIPE = "1"  # change it when the way QEMU is built changes
QEMU_OPTIONS = (
    "--target-list=x86_64-softmmu", "--without-default-features", "--prefix=/usr", "--enable-tcg", "--enable-kvm",
    "--enable-plugins", "--enable-fdt=system", "--enable-trace-backends=log", "--enable-vhost-user", "--disable-werror",
    "--disable-download", "--disable-docs",
    "--disable-debug-info",  # a fifth of the time to compile
    "--disable-install-blobs",  # Debian's source has none
)  # fmt: skip


def qemu_key(variant: str, source: fetch.Source) -> str:
    """The name of a QEMU build: everything that goes into it."""
    if variant not in QEMU_VARIANTS:
        raise UsageError(
            f"Bad --variant: {variant}", "no QEMU has this name", f"use {', '.join(QEMU_VARIANTS)}"
        )
    inputs = [QEMU_RECIPE, source.key, compiler(), *QEMU_OPTIONS]
    if variant != "base":
        inputs.append(parts.get("qemu").key())
    return digest(inputs)


def find_qemu(variant: str = "knownzero") -> Path | None:
    """The binary if the cache has it; never builds."""
    key = qemu_key(variant, fetch.identify("qemu"))
    image = image_path(f"qemu-{variant}", key, "usr/bin/qemu-system-x86_64")
    return image if image.is_file() else None


def qemu_object_dir(variant: str, source: fetch.Source) -> Path:
    """Where QEMU is compiled; its qtests are built and run there too."""
    return paths.sub("obj") / f"qemu-{source.key[:8]}-{variant}"


def build_qemu(variant: str = "knownzero") -> Path:
    """qemu-system-x86_64, built when the cache lacks it; its firmware is found beside it."""
    found = find_qemu(variant)
    if found:
        with contextlib.suppress(OSError):
            os.utime(found.parents[2])
        return found
    tools.need("qemu")
    source = fetch.obtain("qemu")
    with lock.locked(f"build-qemu-{variant}"):
        key = qemu_key(variant, source)
        image = image_path(f"qemu-{variant}", key, "usr/bin/qemu-system-x86_64")
        if image.is_file():
            return image
        with qemu_tree(variant, source) as tree:
            obj = qemu_object_dir(variant, source)
            log = paths.log_file(f"qemu-{variant}")
            began = time.monotonic()
            with progress.step(f"building qemu {source.version} {variant}", log):
                make_qemu(tree, obj, log, ["qemu-system-x86_64"])
            _publish_qemu(obj, image, {
                "what": "qemu", "variant": variant, "version": source.version, "source": source.key,
                "series": parts.get("qemu").key() if variant != "base" else "", "compiler": compiler(),
                "seconds": round(time.monotonic() - began, 1), "key": key,
            })  # fmt: skip
        prune_images()
    return image


@contextlib.contextmanager
def qemu_tree(variant: str, source: fetch.Source) -> Iterator[Path]:
    """The tree a QEMU variant is built from; hold it while building."""
    if variant == "base":
        yield fetch.pristine(source)
    else:
        with apply.working_copy(parts.get("qemu"), source) as tree:
            yield tree


def make_qemu(tree: Path, obj: Path, log: Path, targets: list[str]) -> None:
    """Configure when the recipe changed, then build the targets in ``obj``."""
    what = "QEMU does not build"
    fix = "mend the first error above (the log has the rest), then run it again"
    stamp = obj / ".configured"
    recipe = digest([QEMU_RECIPE, compiler(), str(tree), sys.executable, *QEMU_OPTIONS])
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != recipe:
        shutil.rmtree(obj, ignore_errors=True)
        obj.mkdir(parents=True)
        argv: Argv = [tree / "configure", f"--python={sys.executable}", *QEMU_OPTIONS]
        advice = "run `kz doctor`: it names missing packages; the log says the rest"
        run.logged(argv, log, "QEMU cannot be configured", advice, cwd=obj, env=clean_environment())
        stamp.write_text(recipe, encoding="utf-8")
    ninja = Path(sys.executable).parent / "ninja"
    run.logged([ninja, "-C", obj, f"-j{jobs()}", *targets], log, what, fix, env=clean_environment())
    make_option_roms(tree, obj / "optionrom", log)


def make_option_roms(tree: Path, folder: Path, log: Path) -> None:
    """Build the ROMs that load kernels, with QEMU's Makefile.

    QEMU's configure leaves them out on machines without a 32-bit libgcc, which they do not need.
    """
    folder.mkdir(exist_ok=True)
    config = f"TOPSRC_DIR={tree}\nCC=cc\nOBJCOPY=objcopy\nPYTHON={sys.executable}\n"
    lock.write_if_changed(folder / "config.mak", config.encode())
    argv: Argv = ["make", "-C", folder, "-f", tree / "pc-bios" / "optionrom" / "Makefile", "all"]
    run.logged(argv, log, "QEMU's option ROMs do not build", "read the log", env=clean_environment())


# Firmware that Debian's source leaves out (it ships it as a package of its own).
FIRMWARE = ("bios-256k.bin", "bios.bin", "bios-microvm.bin")


def _publish_qemu(obj: Path, image: Path, metadata: dict[str, object]) -> None:
    seabios = debs.unpacked("seabios") / "usr" / "share" / "seabios"
    with lock.new_directory(image.parents[2]) as work:
        (work / "usr" / "bin").mkdir(parents=True)
        data = work / "usr" / "share" / "qemu"
        data.mkdir(parents=True)
        shutil.copy2(obj / "qemu-system-x86_64", work / "usr" / "bin" / image.name)
        for rom in sorted((obj / "optionrom").glob("*.bin")):
            shutil.copy2(rom, data / rom.name)
        for name in FIRMWARE:
            if not (data / name).exists():
                shutil.copy2(seabios / name, data / name)
        (work / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
