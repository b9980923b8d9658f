# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz build`` and ``kz package``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lab.core import errors
from lab.core.options import Json, Parts, one_of

app = typer.Typer()
SERVER = "server"  # a configuration of the kernel
build_app = typer.Typer(
    no_args_is_help=True, help="Build a kernel or QEMU; the last line of stdout is its path."
)
app.add_typer(build_app, name="build")


@build_app.command("linux")
def linux(
    variant: Annotated[str, typer.Option(help="base, knownzero, off or debug.")] = "knownzero",
    arch: Annotated[str, typer.Option(help="x86_64, um, i386, arm64, or riscv (built only).")] = "x86_64",
    config: Annotated[
        str,
        typer.Option(help="More configuration, merged last: a name in linux/configs/matrix, or a file."),
    ] = "",
    chosen: Annotated[str, Parts] = "",
    as_json: Json = False,
) -> None:
    """Build a kernel (nothing is done when the cache has it)."""
    from lab.build.linux import build_linux
    from lab.series import parts

    _print_image(build_linux(variant, arch, config, parts.split(chosen)), as_json)


@build_app.command("qemu")
def qemu(
    variant: Annotated[str, typer.Option(help="base or knownzero.")] = "knownzero",
    as_json: Json = False,
) -> None:
    """Build qemu-system-x86_64 (nothing is done when the cache has it)."""
    from lab.build.qemu import build_qemu

    _print_image(build_qemu(variant), as_json)


@build_app.command("daemon")
def daemon(
    profile: Annotated[str, typer.Option(help="dev (quick) or release (to be measured).")] = "dev",
    as_json: Json = False,
) -> None:
    """Build the vhost-user daemon with cargo; the last line of stdout is its path."""
    from lab.build import daemon as daemons

    if profile not in daemons.PROFILES:
        raise errors.UsageError(
            f"no profile is called {profile!r}",
            "there are: " + ", ".join(daemons.PROFILES),
            "choose one of them",
        )
    binary = daemons.build(profile)
    print(json.dumps({"image": str(binary)}) if as_json else binary)


def _print_image(image: Path, as_json: bool) -> None:
    from lab.build.images import metadata

    print(json.dumps({"path": str(image), **metadata(image)}) if as_json else image)


@app.command("package")
def package(
    what: Annotated[str, one_of("package", ("kernel", "qemu", "daemon"))],
    config: Annotated[
        str,
        typer.Option(
            help="Of the kernel: server (what systemd and a disk want), cloud (Debian's; an hour or more on two CPUs), small (the lab's, for -kernel: no modules, no disk), or a .config file."
        ),
    ] = SERVER,
    output: Annotated[
        Path | None, typer.Option(help="The folder to write to (default: out/packages).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a Debian package of what the project builds; its path is the last line."""
    from lab.build import package as packages
    from lab.core import paths, progress
    from lab.machine import tools

    folder = output or paths.out() / "packages"
    if config != SERVER and what != "kernel":
        raise errors.UsageError("Bad --config", f"{what} has none", "leave it out")
    tools.need("package")
    if what == "kernel":
        made = packages.package_kernel(folder, config)
    else:
        made = packages.package_qemu(folder) if what == "qemu" else packages.package_daemon(folder)
    size = made.stat().st_size
    progress.note(f"{made.name}: {size >> 20} MiB; install it with apt install {made}")
    print(json.dumps({"path": str(made), "bytes": size}) if as_json else made)
