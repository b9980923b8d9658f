# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz build`` and ``kz package``."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from lab.core import errors
from lab.core.options import OlderLinux, one_of, writable_folder
from lab.machine import arches

app = typer.Typer()
Parts = Annotated[
    str, Option("--parts", metavar="NAME,…", help="Only these parts and what they need.")
]
OtherQemu = Annotated[str, Option(help="Another version in qemu/base.toml (10.2).")]
Release = Annotated[
    str, Option(help="Another version: of QEMU (10.2), or of Linux (6.12, with --config small).")
]
build_app = typer.Typer(no_args_is_help=True)
app.add_typer(build_app, name="build")


@build_app.command("linux")
def linux(
    variant: Annotated[str, Option(help="base, knownzero, off, debug or floor.")] = "knownzero",
    arch: Annotated[str, Option(help=f"{', '.join(arches.ARCHES)}.")] = "x86_64",
    config: Annotated[str, Option(help="Last fragment: a file, or a name in configs/matrix.")] = "",
    chosen: Parts = "",
    older: OlderLinux = "",
) -> None:
    """Build a kernel, unless the cache has it."""
    from lab.build.linux import build_linux
    from lab.machine import fetch
    from lab.patches import parts

    if older:
        fetch.use("linux", older)
    print(build_linux(variant, arch, config, parts.split(chosen)))


@build_app.command("qemu")
def qemu(
    variant: Annotated[str, Option(help="base or knownzero.")] = "knownzero",
    release: OtherQemu = "",
) -> None:
    """Build qemu-system-x86_64, unless the cache has it."""
    from lab.build.qemu import build_qemu
    from lab.machine import fetch

    if release:
        fetch.use("qemu", release)
    print(build_qemu(variant))


@build_app.command("daemon")
def daemon(
    profile: Annotated[str, Option(help="dev (quick) or release (to measure).")] = "dev",
) -> None:
    """Build the vhost-user daemon with cargo."""
    from lab.build import daemon as daemons

    if profile not in daemons.PROFILES:
        raise errors.UsageError(
            f"Bad --profile: {profile}", "no profile has this name", "use dev or release"
        )
    print(daemons.build(profile))


@app.command("package")
def package(
    what: Annotated[str, one_of("package", ("kernel", "qemu", "daemon"))],
    config: Annotated[
        str,
        Option(
            help="Kernel: cloud (Debian's; an hour or more), lab-server (10 minutes), small (no "
            "modules), or a file.",
            show_default="cloud",
        ),
    ] = "",
    sign: Annotated[
        Path | None,
        Option(
            help="Kernel: a PEM file with a key and its certificate, for the modules and Secure "
            "Boot."
        ),
    ] = None,
    release: Release = "",
    output: Annotated[Path | None, Option(help="Folder (default: out/packages).")] = None,
) -> None:
    from lab.build import package as packages
    from lab.core import paths, progress
    from lab.machine import fetch, tools

    folder = writable_folder("--output", output or paths.out() / "packages")
    for option, given, only in (
        ("config", config != "", "kernel"),
        ("sign", sign is not None, "kernel"),
    ):
        if given and what != only:
            raise errors.UsageError(f"Bad --{option}", f"{what} has none", "leave it out")
    if release and what == "daemon":
        raise errors.UsageError("Bad --release", f"{what} has none", "leave it out")
    if release and what == "kernel" and config != packages.SMALL:
        why = "with other configurations, older kernels are not tested"
        raise errors.UsageError(f"Bad --release: {release}", why, "add --config small")
    tools.need("package")
    if release:
        fetch.use("linux" if what == "kernel" else what, release)
    if what == "kernel":
        made = packages.package_kernel(folder, config or packages.CLOUD, sign)
    else:
        made = [(packages.package_qemu if what == "qemu" else packages.package_daemon)(folder)]
    for file in made:
        size = file.stat().st_size
        progress.note(f"{file.name}: {size >> 20} MiB; install it with apt install {file}")
        print(file)
