# SPDX-License-Identifier: GPL-2.0
"""Kernels, built outside the source and kept in the cache by content."""

import functools
import re
import shutil
import tempfile
from pathlib import Path

from lab.build.images import Recipe, cached_environment, compiler, digest, jobs
from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.core.run import Argv
from lab.machine import fetch, tools
from lab.machine.arches import ARCHES
from lab.patches import parts

VARIANTS = ("base", "knownzero", "off", "debug", "floor")
Chosen = tuple[str, ...]  # names of parts


LINUX_RECIPE = "1"  # change it when the way kernels are built changes

# The rest of the kernel's identity must not depend on when and where it was built.
KBUILD = (
    *("KBUILD_BUILD_TIMESTAMP=Thu Jan  1 00:00:00 UTC 1970", "KBUILD_BUILD_USER=knownzero"),
    *("KBUILD_BUILD_HOST=knownzero", "KBUILD_BUILD_VERSION=1", "LOCALVERSION="),
)


CONFIGS = paths.REPO / "linux" / "configs"


def fragments(variant: str, arch: str, config: str = "") -> list[Path]:
    """The fragments of a variant in the order of merging; last ``config``, see ``_more``."""
    machine = ARCHES[arch]
    first = machine.like if machine.differs else arch
    debug = ["knownzero", "debug", f"debug-{first}"]
    more = {"knownzero": ["knownzero"], "off": ["off"], "debug": debug}.get(variant, [])
    files = [CONFIGS / f"{name}.config" for name in (first, *more) if name not in ("", "debug-")]
    if machine.differs:
        files.append(CONFIGS / f"{machine.differs}.config")
    if older := parts.older():
        files.append(CONFIGS / f"{older}.config")
    if config:
        files.append(_more(config))
    return files


def configurations() -> list[str]:
    return sorted(file.stem for file in (CONFIGS / "matrix").glob("*.config"))


def _more(config: str) -> Path:
    """A fragment by its name in configs/matrix, or by its path."""
    if config in configurations():
        return CONFIGS / "matrix" / f"{config}.config"
    if not Path(config).is_file():
        fix = f"use a file, or {', '.join(configurations())}"
        raise UsageError(f"Bad --config: {config}", "no such file, and no such name", fix)
    return Path(config)


def requested(files: list[Path]) -> dict[str, str]:
    """The symbols of fragments with their values, ``n`` for *is not set*.

    The last fragment wins.
    """
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
                fix = "write CONFIG_X=y, or: # CONFIG_X is not set"
                raise LabError(
                    f"{file.name} has a line that is no configuration", line.strip(), fix
                )
    return wanted


def _values(config: str) -> dict[str, str]:
    """The symbols that a .config sets with their values."""
    return dict(re.findall(r"^(CONFIG_\w+)=(.*)$", config, re.MULTILINE))


def lost(wanted: dict[str, str], config: str) -> list[str]:
    """What ``config`` lacks of ``wanted``, in words."""
    final = _values(config)
    return [
        f"{name}={value} (became {final.get(name, 'n')})"
        for name, value in wanted.items()
        if final.get(name, "n") != value
    ]


def ours() -> set[str]:
    """The symbols that the parts of the series add (from parts.toml)."""
    return {f"CONFIG_{name}" for part in parts.get("linux").parts for name in part.configs}


def ours_on(config: str) -> list[str]:
    """The symbols of the series that a .config turns on."""
    values = _values(config)
    return sorted(name for name in ours() if values.get(name) in ("y", "m"))


def linux_key(
    variant: str, arch: str, source: fetch.Source, config: str = "", chosen: Chosen = ()
) -> str:
    """The name of a kernel image: everything that goes into it."""
    files = _checked_fragments(variant, arch, config)
    inputs = [LINUX_RECIPE, arch, variant, source.key, compiler(ARCHES[arch].prefix)]
    inputs += [file.read_text(encoding="utf-8") for file in files]
    if variant != "base" or chosen:
        inputs.append(parts.get("linux", chosen).key())
    return digest(inputs)


def _checked_fragments(variant: str, arch: str, config: str = "") -> list[Path]:
    if variant not in VARIANTS:
        raise UsageError(
            f"Bad --variant: {variant}", "no kernel has this name", f"use {', '.join(VARIANTS)}"
        )
    if arch not in ARCHES:
        raise UsageError(
            f"Bad --arch: {arch}", "no kernel is built for it", f"use {', '.join(ARCHES)}"
        )
    return fragments(variant, arch, config)


def _patches(variant: str, arch: str, chosen: Chosen) -> Chosen:
    """The parts of a variant, and the patches of linux/measure that it has; empty: all parts."""
    measure = ARCHES[arch].measure
    if variant in ("base", "floor"):
        return (*(["floor"] if variant == "floor" else []), *measure)
    if measure and not chosen:
        chosen = tuple(part.name for part in parts.get("linux").parts)
    return (*chosen, *measure)


def _recipe(variant: str, arch: str, config: str = "", chosen: Chosen = ()) -> Recipe:
    file, some = Path(ARCHES[arch].image).name, bool(chosen)
    chosen = _patches(variant, arch, chosen)

    def make(tree: Path, obj: Path, log: Path) -> None:
        files = fragments(variant, arch, config)
        make_linux(tree, obj, files, arch, variant, log, [file], step=bool(chosen))

    def publish(obj: Path, work: Path) -> dict[str, object]:
        for name in (ARCHES[arch].image, "vmlinux", ".config", "System.map"):
            shutil.copy2(obj / name, work / Path(name).name)
        release = (
            (obj / "include" / "config" / "kernel.release").read_text(encoding="utf-8").strip()
        )
        made = {"arch": arch, "config": config, "compiler": compiler(ARCHES[arch].prefix)}
        return {**made, "release": release}

    name = "-".join(
        [arch, variant, *([Path(config).stem] if config else []), *(["parts"] if some else [])]
    )
    key = functools.partial(linux_key, variant, arch, config=config, chosen=chosen)
    return Recipe("linux", variant, name, file, key, make, publish, chosen)


def find_linux(variant: str) -> Path | None:
    return _recipe(variant, "x86_64").find()


def build_linux(variant: str, arch: str = "x86_64", config: str = "", chosen: Chosen = ()) -> Path:
    """The kernel image (bzImage, Image; for um the executable), built when the cache lacks it.

    ``config``: a fragment that changes the variant's configuration, see ``fragments``. ``chosen``:
    these parts of the series and the parts they stand on; by default all. vmlinux, .config,
    System.map and metadata.json stand beside the image.
    """
    _checked_fragments(variant, arch, config)
    tools.need_compiler(arch)
    return _recipe(variant, arch, config, chosen).build()


def _known(tree: Path) -> set[str]:
    """The symbols that a kernel's Kconfig files define, and let a configuration set."""
    found = set()
    for file in tree.rglob("Kconfig*"):
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        for block in re.split(r"^\s*(?:menu)?config (?=\w+$)", text, flags=re.MULTILINE)[1:]:
            if re.search(r'^\s+(?:bool|tristate|int|hex|string|prompt)\s+"', block, re.MULTILINE):
                found.add(f"CONFIG_{block.split()[0]}")
    return found


def _kbuild(arch: str) -> list[str]:
    about = ARCHES[arch]
    cross = [f"CROSS_COMPILE={about.prefix}"] if about.prefix else []
    return [f"ARCH={about.kbuild or arch}", *cross, *KBUILD]


def configure_linux(
    tree: Path, obj: Path, files: list[Path], arch: str, log: Path, lenient: bool = False
) -> None:
    """Make obj/.config from fragments.

    A lost symbol is an error, unless it is ours and ``lenient``.
    """
    what = f"cannot configure the kernel ({', '.join(f.name for f in files)})"
    obj.mkdir(parents=True, exist_ok=True)
    wanted = requested(files)
    if older := parts.older():
        known = _known(tree)
        if unknown := sorted(set(wanted) - known):
            progress.note(f"Linux {older} has no {', '.join(unknown)}: left out")
        wanted = {name: value for name, value in wanted.items() if name in known}
    with tempfile.TemporaryDirectory(prefix=".config-", dir=paths.sub("work")) as folder:
        merge = tree / "scripts" / "kconfig" / "merge_config.sh"
        fix = "read the log; then correct the fragment in linux/configs"
        # merge_config.sh does not quote the names of its files, and the repository's may have a
        # space.
        copies = [
            shutil.copy(file, Path(folder) / f"{number}.config")
            for number, file in enumerate(files)
        ]
        argv: Argv = ["bash", merge, "-m", "-O", folder, *copies]
        run.logged(argv, log, what, fix, cwd=tree)
        merged = Path(folder) / ".config"
        argv = ["make", "-s", "-C", tree, f"O={obj}", *_kbuild(arch), f"KCONFIG_ALLCONFIG={merged}"]
        run.logged([*argv, "allnoconfig"], log, what, fix)
    if lenient:
        series = ours()
        wanted = {name: value for name, value in wanted.items() if name not in series}
    missing = lost(wanted, (obj / ".config").read_text(encoding="utf-8"))
    if missing:
        fix = (
            "turn on what the symbol depends on, apply its series, or correct the fragment in "
            "linux/configs"
        )
        raise LabError(what, "the kernel's Kconfig did not accept: " + ", ".join(missing), fix)


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
    """Configure and build in ``obj``.

    ``step``: in the middle of the series, with ccache, and without objects that are turned off.
    Base has ccache, too, for the floor kernel.
    """
    configure_linux(tree, obj, files, arch, log, lenient=step)
    config = (obj / ".config").read_text(encoding="utf-8")
    turned_on = ours_on(config)
    if turned_on and variant in ("base", "off", "floor"):
        what = f"the kernel variant {variant} has options of the series on"
        raise LabError(what, ", ".join(turned_on), "correct linux/configs/off.config")
    if step:
        targets = [target for target in targets if has_object(tree, target, config)]
    environment = cached_environment() if step or variant == "base" else None
    make_targets(
        tree, obj, targets, log, arch, f"the kernel does not build ({arch}, {variant})", environment
    )


def has_object(tree: Path, target: str, config: str) -> bool:
    """Whether a kernel with this .config has a target, an object or a folder with "/" at its end.

    Make would compile an object that its Makefile leaves out.
    """
    folder, _, name = target.rpartition("/")
    if not name:
        return True
    text = (tree / folder / "Makefile").read_text(encoding="utf-8")
    option = re.search(rf"^obj-\$\((\w+)\).*\b{re.escape(name)}", text, re.MULTILINE)
    return not option or f"{option[1]}=y" in config.splitlines()


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
    fix = "correct the first error above (the log has the rest), then run it again"
    run.logged(argv, log, what, fix, env=environment, pass_fds=lock.held())


def adopt_config(
    tree: Path,
    obj: Path,
    file: Path,
    without: tuple[str, ...],
    suffix: str,
    log: Path,
    more: str = "",
) -> None:
    """Make obj/.config from another kernel's, with our options and ``more`` on.

    ``without``: prefixes of the symbols that are left out.
    """
    fragment = fragments("knownzero", "x86_64")[-1]
    drop = re.compile(rf"^(?:# )?(?:{'|'.join(without)})\w*[ =]")
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not drop.match(line)]
    lines += [fragment.read_text(encoding="utf-8"), more, f'CONFIG_LOCALVERSION="{suffix}"', ""]
    obj.mkdir(parents=True, exist_ok=True)
    lock.write_atomically(obj / ".config", "\n".join(lines))
    make_targets(tree, obj, ["olddefconfig"], log)
    if missing := lost(requested([fragment]), (obj / ".config").read_text(encoding="utf-8")):
        what = f"{file}: required options are missing: {', '.join(missing)}"
        raise LabError(what, "Kconfig turns them off", "turn on the options that they depend on")
