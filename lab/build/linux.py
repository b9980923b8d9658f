# SPDX-License-Identifier: GPL-2.0
"""Kernels and QEMU binaries, built outside the sources and kept in the cache by content."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.core.run import Argv
from lab.machine import debs, fetch, tools
from lab.series import apply, parts

VARIANTS = ("base", "knownzero", "off", "debug")
ARCHES = ("x86_64", "um")


@dataclass(frozen=True)
class Machine:
    """An architecture: ``image`` is what is booted, ``differs`` the fragment that comes last."""

    image: str
    like: str = ""
    differs: str = ""
    prefix: str = ""  # of a cross compiler


# Besides ARCHES, those that only some tests at night are for.
MACHINES = {
    "x86_64": Machine("arch/x86/boot/bzImage"),
    "um": Machine("linux"),
    "i386": Machine("arch/x86/boot/bzImage", "x86_64", "i386", "i686-linux-gnu-"),
    "arm64": Machine("arch/arm64/boot/Image", "x86_64", "arm64", "aarch64-linux-gnu-"),
    "riscv": Machine("arch/riscv/boot/Image", "", "riscv", "riscv64-linux-gnu-"),
}
QEMU_VARIANTS = ("base", "knownzero")
LINUX_RECIPE = "1"  # change it when the way kernels are built changes
QEMU_RECIPE = "1"
KEEP_IMAGES = 40
OURS = re.compile(r"^CONFIG_(PAGE_ZEROED\w*|PREZERO_PAGE\w*|REFPAGE\w*)=[ym]$", re.MULTILINE)

# The rest of the kernel's identity must not depend on when and where it was built.
KBUILD = (
    "KBUILD_BUILD_TIMESTAMP=Thu Jan  1 00:00:00 UTC 1970",
    "KBUILD_BUILD_USER=knownzero",
    "KBUILD_BUILD_HOST=knownzero",
    "KBUILD_BUILD_VERSION=1",
    "LOCALVERSION=",
)

QEMU_OPTIONS = (
    "--target-list=x86_64-softmmu",
    "--without-default-features",
    "--prefix=/usr",
    "--enable-tcg",
    "--enable-kvm",
    "--enable-plugins",
    "--enable-fdt=system",
    "--enable-trace-backends=log",
    "--enable-vhost-user",
    "--disable-werror",
    "--disable-download",
    "--disable-docs",
    "--disable-debug-info",  # a fifth of the time to compile
    "--disable-install-blobs",  # Debian's source has none
)


def jobs() -> int:
    """How many compilers may run at once: one per CPU this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


@functools.cache
def compiler(prefix: str = "") -> str:
    """The compiler and linker, as a line that changes when they do; ``prefix``: those of a cross compiler."""
    lines = []
    for tool in (f"{prefix}gcc" if prefix else "cc", f"{prefix}ld"):
        text = run.output(
            [tool, "--version"], "cannot compile", "run `kz doctor`: it names the packages to install"
        )
        lines.append(text.splitlines()[0])
    return "; ".join(lines)


def fragments(variant: str, arch: str, config: str = "") -> list[Path]:
    """The configuration fragments of a variant, in the order in which they are merged.

    ``config`` comes last: a name in configs/matrix, or a file.
    """
    folder = paths.REPO / "linux" / "configs"
    machine = MACHINES[arch]
    first = machine.like if machine.differs else arch
    names = {
        "base": [first],
        "knownzero": [first, "knownzero"],
        "off": [first, "off"],
        "debug": [first, "knownzero", "debug", f"debug-{first}"],
    }[variant]
    files = [folder / f"{name}.config" for name in names if name not in ("", "debug-")]
    if machine.differs:
        files.append(folder / f"{machine.differs}.config")
    if config:
        files.append(_more(config))
    return files


def configurations() -> list[str]:
    """The names that ``--config`` knows."""
    return sorted(file.stem for file in (paths.REPO / "linux" / "configs" / "matrix").glob("*.config"))


def _more(config: str) -> Path:
    """A fragment by its name in configs/matrix, or by its path."""
    if config in configurations():
        return paths.REPO / "linux" / "configs" / "matrix" / f"{config}.config"
    if not Path(config).is_file():
        raise UsageError(
            f"no configuration is called {config!r}",
            "it is no file, and there are: " + ", ".join(configurations()),
            "choose one of them with --config",
        )
    return Path(config)


def requested(files: list[Path]) -> dict[str, str]:
    """What fragments ask for: symbol -> value, ``n`` for *is not set*; the last one wins."""
    wanted: dict[str, str] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            unset = re.fullmatch(r"# (CONFIG_\w+) is not set", line.strip())
            assigned = re.fullmatch(r"(CONFIG_\w+)=(.*)", line.strip())
            if unset:
                wanted[unset[1]] = "n"
            elif assigned:
                wanted[assigned[1]] = assigned[2]
            elif line.strip() and not line.startswith("#"):
                raise LabError(
                    f"{file.name} has a line that is no configuration",
                    line.strip(),
                    "write CONFIG_X=y, or: # CONFIG_X is not set",
                )
    return wanted


def lost(wanted: dict[str, str], config: str) -> list[str]:
    """The symbols of ``wanted`` that the final .config does not have as asked."""
    final = dict(re.findall(r"^(CONFIG_\w+)=(.*)$", config, re.MULTILINE))
    return [
        f"{name}={value} (became {final.get(name, 'n')})"
        for name, value in wanted.items()
        if final.get(name, "n") != value
    ]


def clean_environment() -> dict[str, str]:
    """The environment without what would steer kbuild or make behind our back."""
    drop = {
        "ARCH",
        "SUBARCH",
        "CROSS_COMPILE",
        "KBUILD_OUTPUT",
        "O",
        "MAKEFLAGS",
        "MFLAGS",
        "MAKELEVEL",
        "KCFLAGS",
        "LOCALVERSION",
        "KCONFIG_CONFIG",
        "LLVM",
    }
    return {k: v for k, v in os.environ.items() if k not in drop}


def cached_environment() -> dict[str, str]:
    """The same with compilers that remember, by ccache, what they compiled in whatever folder."""
    environment = clean_environment()
    environment["PATH"] = f"{tools.CCACHE}:{environment.get('PATH', os.defpath)}"
    return environment | {"CCACHE_DIR": str(paths.sub("ccache")), "CCACHE_MAXSIZE": "5G"}


def _digest(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def linux_key(
    variant: str, arch: str, source: fetch.Source, config: str = "", chosen: tuple[str, ...] = ()
) -> str:
    """The name of a kernel image: everything that goes into it."""
    files = _checked_fragments(variant, arch, config)
    inputs = [LINUX_RECIPE, arch, variant, source.key, compiler(MACHINES[arch].prefix)]
    inputs += [file.read_text(encoding="utf-8") for file in files]
    if variant != "base":
        inputs.append(parts.get("linux", chosen).key())
    return _digest(inputs)


def _checked_fragments(variant: str, arch: str, config: str = "") -> list[Path]:
    if variant not in VARIANTS:
        raise UsageError(
            f"no kernel variant is called {variant!r}",
            "there are: " + ", ".join(VARIANTS),
            "choose one of them with --variant",
        )
    if arch not in MACHINES:
        raise UsageError(
            f"no kernel is built for {arch!r}",
            "there are: " + ", ".join(MACHINES),
            "choose one of them with --arch",
        )
    return fragments(variant, arch, config)


def _image(prefix: str, key: str, name: str) -> Path:
    return paths.sub("images") / f"{prefix}-{key[:16]}" / name


def linux_image_name(arch: str) -> str:
    """The file that is booted."""
    return Path(MACHINES[arch].image).name


def _linux_name(variant: str, arch: str, config: str, chosen: tuple[str, ...] = ()) -> str:
    """The kernel's name in folders, logs and locks."""
    return "-".join([arch, variant, *([Path(config).stem] if config else []), *sorted(chosen)])


def find_linux(
    variant: str, arch: str = "x86_64", config: str = "", chosen: tuple[str, ...] = ()
) -> Path | None:
    """The image if the cache has it; never builds."""
    key = linux_key(variant, arch, fetch.identify("linux"), config, chosen)
    image = _image(f"linux-{_linux_name(variant, arch, config, chosen)}", key, linux_image_name(arch))
    return image if image.is_file() else None


def build_linux(variant: str, arch: str = "x86_64", config: str = "", chosen: tuple[str, ...] = ()) -> Path:
    """The kernel image (bzImage, Image; for um the executable), built when the cache lacks it.

    ``config``: a fragment that changes the variant's configuration, see ``fragments``. ``chosen``: these parts of
    the series and what they stand on; by default all. vmlinux, .config, System.map and metadata.json stand beside
    the image.
    """
    _checked_fragments(variant, arch, config)
    tools.need_compiler(arch)
    found = find_linux(variant, arch, config, chosen)
    if found:
        with contextlib.suppress(OSError):
            os.utime(found.parent)
        return found
    tools.need("linux")
    source = fetch.obtain("linux")
    name = _linux_name(variant, arch, config, chosen)
    with lock.locked(f"build-linux-{name}"):
        key = linux_key(variant, arch, source, config, chosen)
        image = _image(f"linux-{name}", key, linux_image_name(arch))
        if image.is_file():
            return image
        with contextlib.ExitStack() as stack:
            if variant == "base":
                tree = fetch.pristine(source)
            else:
                tree = stack.enter_context(apply.working_copy(parts.get("linux", chosen), source))
            obj = paths.sub("obj") / f"linux-{source.key[:8]}-{name}"
            log = paths.log_file(f"linux-{name}")
            began = time.monotonic()
            with progress.step(f"building linux {source.version} {name.replace('-', ' ')}", log):
                files = fragments(variant, arch, config)
                image_name = linux_image_name(arch)
                make_linux(tree, obj, files, arch, variant, log, [image_name], step=bool(chosen))
            _publish_linux(obj, image, arch, {
                "what": "linux", "variant": variant, "arch": arch, "config": config, "version": source.version, "source": source.key,
                "series": parts.get("linux", chosen).key() if variant != "base" else "", "compiler": compiler(MACHINES[arch].prefix),
                "seconds": round(time.monotonic() - began, 1), "key": key,
            })  # fmt: skip
        prune_images()
    return image


def _kbuild(arch: str) -> list[str]:
    """What every call of the kernel's make is told."""
    prefix = MACHINES[arch].prefix
    return [f"ARCH={arch}", *([f"CROSS_COMPILE={prefix}"] if prefix else []), *KBUILD]


def configure_linux(
    tree: Path, obj: Path, files: list[Path], arch: str, log: Path, lenient: bool = False
) -> None:
    """Make obj/.config from fragments over allnoconfig; a symbol that is lost is an error.

    ``lenient`` forgives our own symbols, for steps of the series that do not have them yet.
    """
    what = f"cannot configure the kernel ({', '.join(f.name for f in files)})"
    obj.mkdir(parents=True, exist_ok=True)
    wanted = requested(files)
    with tempfile.TemporaryDirectory(prefix=".config-", dir=paths.sub("work")) as folder:
        merge = tree / "scripts" / "kconfig" / "merge_config.sh"
        fix = "read the log; then mend the fragment in linux/configs"
        run.logged(
            ["bash", merge, "-m", "-O", folder, *files], log, what, fix, cwd=tree, env=clean_environment()
        )
        merged = Path(folder) / ".config"
        argv: Argv = [
            "make",
            "-s",
            "-C",
            tree,
            f"O={obj}",
            *_kbuild(arch),
            f"KCONFIG_ALLCONFIG={merged}",
            "allnoconfig",
        ]
        run.logged(argv, log, what, fix, env=clean_environment())
    missing = lost(wanted, (obj / ".config").read_text(encoding="utf-8"))
    if lenient:
        missing = [item for item in missing if not OURS.match(item.split(" ")[0])]
    if missing:
        raise LabError(
            what,
            "the kernel's Kconfig did not accept: " + ", ".join(missing),
            "find what the symbol depends on, or whether the series that brings it is there; then mend the fragment in linux/configs",
        )


def make_linux(
    tree: Path,
    obj: Path,
    files: list[Path],
    arch: str,
    variant: str,
    log: Path,
    targets: list[str],
    step: bool = False,
) -> None:
    """Configure and build in ``obj``; only what changed is compiled again.

    ``step``: the tree is one of many alike. Our symbols may not be there yet, and what was compiled for
    another of them is taken from a cache.
    """
    configure_linux(tree, obj, files, arch, log, lenient=step)
    if variant in ("base", "off"):
        ours = OURS.findall((obj / ".config").read_text(encoding="utf-8"))
        if ours:
            raise LabError(
                f"the kernel variant {variant} has our options on",
                ", ".join(ours),
                "mend linux/configs/off.config",
            )
    environment = cached_environment() if step else clean_environment()
    make_targets(tree, obj, targets, log, arch, f"the kernel does not build ({arch}, {variant})", environment)


def make_targets(
    tree: Path,
    obj: Path,
    targets: list[str],
    log: Path,
    arch: str = "x86_64",
    what: str = "the kernel does not build",
    environment: dict[str, str] | None = None,
) -> None:
    """Run make in a configured ``obj``; LabError, beginning with ``what``, when it fails."""
    argv: Argv = ["make", "-C", tree, f"O={obj}", f"-j{jobs()}", *_kbuild(arch), *targets]
    fix = "mend the first error above (the log has the rest), then run it again"
    run.logged(argv, log, what, fix, env=environment or clean_environment())


def adopt_config(
    tree: Path, obj: Path, given: Path, without: tuple[str, ...], localversion: str, log: Path
) -> None:
    """Make obj/.config from a whole .config of another kernel, with ours on.

    ``without``: symbols that are not taken over, those that begin with them included.
    """
    ours = fragments("knownzero", "x86_64")[-1]
    drop = re.compile(rf"^(?:# )?(?:{'|'.join(without)})\w*[ =]")
    lines = [line for line in given.read_text(encoding="utf-8").splitlines() if not drop.match(line)]
    lines += [ours.read_text(encoding="utf-8"), f'CONFIG_LOCALVERSION="{localversion}"', ""]
    obj.mkdir(parents=True, exist_ok=True)
    lock.write_atomically(obj / ".config", "\n".join(lines))
    make_targets(tree, obj, ["olddefconfig"], log)
    missing = lost(requested([ours]), (obj / ".config").read_text(encoding="utf-8"))
    if missing:
        raise LabError(
            f"{given} does not do for our kernel",
            "it did not accept: " + ", ".join(missing),
            "find what these symbols depend on, and turn that on in it",
        )


def build_part(variant: str, arch: str, targets: list[str], config: str = "") -> Path:
    """Compile folders or files of a kernel (``mm/``, …) without linking it; returns the object folder.

    For what only needs to compile; what was built and did not change is not built again.
    """
    files = _checked_fragments(variant, arch, config)
    tools.need("linux")
    tools.need_compiler(arch)
    source = fetch.obtain("linux")
    name = _linux_name(variant, arch, config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.locked(f"build-linux-{name}"))
        tree = (
            fetch.pristine(source)
            if variant == "base"
            else stack.enter_context(apply.working_copy(parts.get("linux"), source))
        )
        obj = paths.sub("obj") / f"linux-{source.key[:8]}-{name}"
        log = paths.log_file(f"linux-{name}-part")
        what = f"compiling {' '.join(targets)} of linux {source.version} {name.replace('-', ' ')}"
        with progress.step(what, log):
            make_linux(tree, obj, files, arch, variant, log, targets)
    return obj


def _publish_linux(obj: Path, image: Path, arch: str, metadata: dict[str, object]) -> None:
    with lock.new_directory(image.parent) as work:
        shutil.copy2(obj / MACHINES[arch].image, work / image.name)
        for name in ("vmlinux", ".config", "System.map"):
            shutil.copy2(obj / name, work / name)
        metadata["release"] = (
            (obj / "include" / "config" / "kernel.release").read_text(encoding="utf-8").strip()
        )
        (work / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")


def metadata(image: Path) -> dict[str, object]:
    """What is known of an image in the cache; empty for others."""
    for folder in image.parents[:4]:
        file = folder / "metadata.json"
        if file.is_file():
            data: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
            return data
    return {}


def qemu_key(variant: str, source: fetch.Source) -> str:
    """The name of a QEMU build: everything that goes into it."""
    if variant not in QEMU_VARIANTS:
        raise UsageError(
            f"no QEMU variant is called {variant!r}",
            "there are: " + ", ".join(QEMU_VARIANTS),
            "choose one of them with --variant",
        )
    inputs = [QEMU_RECIPE, source.key, compiler(), *QEMU_OPTIONS]
    if variant != "base":
        inputs.append(parts.get("qemu").key())
    return _digest(inputs)


def find_qemu(variant: str = "knownzero") -> Path | None:
    """The binary if the cache has it; never builds."""
    key = qemu_key(variant, fetch.identify("qemu"))
    image = _image(f"qemu-{variant}", key, "usr/bin/qemu-system-x86_64")
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
        image = _image(f"qemu-{variant}", key, "usr/bin/qemu-system-x86_64")
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
    recipe = _digest([QEMU_RECIPE, compiler(), str(tree), sys.executable, *QEMU_OPTIONS])
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


def prune_images(keep: int = KEEP_IMAGES) -> None:
    """Drop the images that were not used for longest, and what is left of old work."""
    folder = paths.sub("images")
    kept = sorted(
        (p for p in folder.iterdir() if not p.name.startswith(".")),
        key=lambda p: p.stat().st_mtime,
        reverse=True,
    )
    for old in kept[keep:]:
        if time.time() - old.stat().st_mtime > 86400:
            shutil.rmtree(old, ignore_errors=True)
    for part in folder.glob(".*.part"):
        if time.time() - part.stat().st_mtime > 86400:
            shutil.rmtree(part, ignore_errors=True)
    for log in paths.sub("logs").iterdir():
        if time.time() - log.stat().st_mtime > 14 * 86400:
            log.unlink(missing_ok=True)
