# SPDX-License-Identifier: GPL-2.0
"""Debian packages of the kernel, QEMU and the daemon."""

import os
import shlex
import tomllib
from pathlib import Path
from typing import Any

from lab.build import daemon, deb
from lab.build import linux as build
from lab.build.images import metadata
from lab.build.qemu import FIRMWARE, build_qemu
from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.machine import fetch, stock, tools
from lab.series import apply, parts

ROOM = "usr/lib/qemu-knownzero"
SMALL, SERVER, CLOUD = "small", "server", "cloud"
LOCALVERSION = "-knownzero"
# Options of a distribution that are left out: its keys, its name, and debug information.
NOT_TAKEN_OVER = (
    "CONFIG_LOCALVERSION",
    "CONFIG_BUILD_SALT",
    "CONFIG_SYSTEM_TRUSTED_KEYS",
    "CONFIG_SYSTEM_REVOCATION_KEYS",
    "CONFIG_MODULE_SIG",
    "CONFIG_SECURITY_LOCKDOWN_LSM",
    "CONFIG_DEBUG_INFO",
)
HOOKS = """#!/bin/sh
# Run the machine's hooks for kernels: they make an initramfs and a boot entry.
set -e
hooks=/etc/kernel/{when}.d
if [ -d "$hooks" ]; then
\tDEB_MAINT_PARAMS="$*" run-parts --arg={release} --arg=/boot/vmlinuz-{release} "$hooks"
fi
"""


def revision() -> str:
    """A suffix that rises with every commit, so that a newer package replaces an older one."""
    done = run.ask(["git", "-C", paths.REPO, "rev-list", "--count", "HEAD"])
    return f"+knownzero{done.stdout.strip() or 0}"


def package_daemon(folder: Path, profile: str = "release") -> Path:
    """The daemon with its manual pages and units, by the list in its Cargo.toml."""
    binary = daemon.build(profile)
    place = daemon.WORKSPACE / "daemon"
    workspace = tomllib.loads((daemon.WORKSPACE / "Cargo.toml").read_text(encoding="utf-8"))
    crate = tomllib.loads((place / "Cargo.toml").read_text(encoding="utf-8"))["package"]
    about: dict[str, Any] = crate["metadata"]["deb"]
    items = []
    for source, target, mode in about["assets"]:
        found = [binary] if source.startswith("target/") else sorted(place.glob(source))
        if not found:
            why, fix = f"no file is called {source}", "correct its Cargo.toml"
            raise LabError("cannot package the daemon", why, fix)
        for file in found:
            items.append(
                deb.Item(file.resolve(), f"{target}{file.name}", int(mode, 8), file == binary)
            )
    licences = paths.REPO / "LICENSES"
    items += _licences(crate["name"], [licences / "Apache-2.0.txt", licences / "BSD-3-Clause.txt"])
    scripts = sorted((place / about["maintainer-scripts"]).iterdir())
    made = deb.Deb(
        crate["name"],
        workspace["workspace"]["package"]["version"] + revision(),
        crate["description"],
        about["extended-description"],
        items,
        section=about["section"],
        depends=deb.shared_libraries([binary]),
        scripts={file.name: file.read_text(encoding="utf-8") for file in scripts},
    )
    return deb.write(made, folder)


def package_qemu(folder: Path) -> Path:
    """The patched QEMU in a folder of its own, beside the distribution's.

    Firmware is the distribution's.
    """
    binary = build_qemu("knownzero")
    root = binary.parents[1]
    firmware = [root.parent / place for place in FIRMWARE.values()]
    items = [
        deb.Item(
            file,
            f"{ROOM}/{file.relative_to(root)}",
            0o755 if file == binary else 0o644,
            file == binary,
        )
        for file in sorted(root.rglob("*"))
        if file.is_file() and not any(place in file.parents for place in firmware)
    ]
    items += _licences("qemu-knownzero", [fetch.pristine(fetch.obtain("qemu")) / "COPYING"])
    room = {f"{ROOM}/{place.removeprefix('usr/')}": place for place in FIRMWARE.values()}
    links = {link: os.path.relpath(place, Path(link).parent) for link, place in room.items()}
    return deb.write(
        deb.Deb(
            "qemu-knownzero",
            fetch.obtain("qemu").version + revision(),
            "QEMU whose balloon reports to guests which memory is zero",
            "An x86_64 system emulator with the Knownzero series, for libvirt: "
            "qemu-system-x86_64-knownzero. It lives beside the distribution's, and has what "
            "guests of servers use.",
            items,
            depends=(*deb.shared_libraries([binary]), *FIRMWARE),
            recommends=("ovmf", "qemu-utils"),
            links={f"usr/bin/{binary.name}-knownzero": f"../../{ROOM}/bin/{binary.name}", **links},
        ),
        folder,
    )


def package_kernel(folder: Path, config: str) -> Path:
    """The patched kernel. ``config``.

    Small (as the lab boots it), server, cloud (Debian's), or a file.
    """
    if config == SMALL:
        image = build.build_linux("knownzero")
        release = str(metadata(image)["release"])
        items = _boot_files(image, image.parent, release)
        needs: tuple[str, ...] = ()
    else:
        image, items, release = _kernel_with_modules(config)
        needs = ("kmod", "linux-base", "initramfs-tools | linux-initramfs-tool")
    name = f"linux-image-{release.removesuffix(LOCALVERSION)}{LOCALVERSION}"
    items += _licences(name, [fetch.pristine(fetch.obtain("linux")) / "COPYING"])
    made = deb.Deb(
        name,
        fetch.obtain("linux").version + revision(),
        "Linux that does not zero memory which is known to be zero",
        "A kernel with the Knownzero series: free memory that the host zeroed, or that was zeroed "
        "in spare CPU time, is not zeroed again when it is wanted.",
        items,
        section="kernel",
        depends=needs,
        scripts={
            when: HOOKS.format(when=when, release=shlex.quote(release))
            for when in ("postinst", "postrm")
        },
    )
    return deb.write(made, folder)


def _licences(name: str, files: list[Path]) -> list[deb.Item]:
    place = f"usr/share/doc/{name}"
    if len(files) == 1:
        return [deb.Item(files[0], f"{place}/copyright")]
    return [deb.Item(file, f"{place}/copyright.{file.name}") for file in files]


def _boot_files(image: Path, built: Path, release: str) -> list[deb.Item]:
    return [
        deb.Item(image, f"boot/vmlinuz-{release}"),
        deb.Item(built / ".config", f"boot/config-{release}"),
        deb.Item(built / "System.map", f"boot/System.map-{release}", 0o600),
    ]


def _kernel_with_modules(config: str) -> tuple[Path, list[deb.Item], str]:
    name = config if config in (SERVER, CLOUD) else "custom"
    if config == SERVER:
        given = paths.REPO / "linux" / "configs" / "server.config"
    else:
        given = stock.config() if config == CLOUD else Path(config)
        if not given.is_file():
            why, fix = "no such file", "use small, server, cloud or a .config"
            raise UsageError(f"Bad --config: {config}", why, fix)
    tools.need("linux")
    source = fetch.obtain("linux")
    log = paths.log_file(f"package-kernel-{name}")
    with (
        lock.locked(f"build-linux-package-{name}"),
        apply.working_copy(parts.get("linux"), source) as tree,
    ):
        obj = paths.sub("obj") / f"linux-{source.key[:8]}-package-{name}"
        if config == SERVER:
            files = build.fragments("knownzero", "x86_64", str(given))
            build.configure_linux(tree, obj, files, "x86_64", log)
        else:
            build.adopt_config(tree, obj, given, NOT_TAKEN_OVER, LOCALVERSION, log)
        with progress.step(
            f"building linux {source.version} with {given.name}, modules and all", log
        ):
            build.make_targets(tree, obj, ["bzImage", "modules"], log)
        release = (obj / "include/config/kernel.release").read_text(encoding="utf-8").strip()
        with (
            progress.step("stripping the modules", log),
            lock.new_directory(obj / "modules") as staging,
        ):
            options = [
                f"INSTALL_MOD_PATH={staging}",
                "INSTALL_MOD_STRIP=1",
                f"DEPMOD={stock.depmod()}",
            ]
            build.make_targets(tree, obj, [*options, "modules_install"], log)
    image, modules = obj / "arch" / "x86" / "boot" / "bzImage", obj / "modules"
    files = [
        file for file in sorted(modules.rglob("*")) if file.is_file() and not file.is_symlink()
    ]
    items = [deb.Item(file, f"usr/{file.relative_to(modules)}") for file in files]
    return image, _boot_files(image, obj, release) + items, release
