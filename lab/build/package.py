# SPDX-License-Identifier: GPL-2.0
"""Debian packages of the kernel, QEMU and the daemon."""

import os
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.build import daemon, deb
from lab.build import linux as build
from lab.build.images import metadata
from lab.build.qemu import FIRMWARE, build_qemu
from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.machine import fetch, stock, tools
from lab.patches import apply, parts

ROOM = "usr/lib/qemu-knownzero"
SMALL, SERVER, CLOUD = "small", "lab-server", "cloud"
LOCALVERSION = "-knownzero"
# On two CPUs that do nothing else.
HOW_LONG = {
    CLOUD: "an hour or more: Debian's cloud kernel has 1,000 modules "
    "(--config lab-server takes 10 minutes)",
    SERVER: "10 minutes: a kernel for the lab's guests, without network drivers",
    "custom": "as long as your configuration needs: a distribution's takes an hour or more",
}
# The options that a guest of a distribution needs, by purpose.
NEEDED = paths.REPO / "packaging" / "kernel" / "needed.toml"
# Options of a distribution that are left out: its name, its keys, and debug information.
NOT_TAKEN_OVER = (
    "CONFIG_LOCALVERSION",
    "CONFIG_BUILD_SALT",
    "CONFIG_SYSTEM_TRUSTED_KEYS",
    "CONFIG_SYSTEM_REVOCATION_KEYS",
    "CONFIG_DEBUG_INFO",
)
# Without a key to sign with: lockdown refuses modules without a signature.
NOT_WITHOUT_KEY = ("CONFIG_MODULE_SIG", "CONFIG_SECURITY_LOCKDOWN_LSM")
SIGNED = """CONFIG_MODULE_SIG=y
CONFIG_MODULE_SIG_ALL=y
CONFIG_MODULE_SIG_SHA256=y
"""
KEY_OF_MODULES = "CONFIG_MODULE_SIG_KEY"
# As scripts/package/builddeb of Linux has it.
HOOKS = """#!/bin/sh
# Run the machine's hooks for kernels: they make an initramfs and a boot entry.
set -e
export DEB_MAINT_PARAMS="$*" INITRD=Yes
set --
for folder in /etc/kernel/{when}.d /usr/share/kernel/{when}.d; do
\t[ ! -d "$folder" ] || set -- "$@" "$folder"
done
[ $# -eq 0 ] || run-parts --arg={release} --arg=/boot/vmlinuz-{release} "$@"
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel to package: its files, its release, and the headers for modules.

    A kernel without modules has no headers.
    """

    release: str
    items: list[deb.Item]
    headers: Path | None = None

    def name(self, kind: str) -> str:
        """The name of the package ``linux-KIND-…``."""
        return f"linux-{kind}-{self.release.removesuffix(LOCALVERSION)}{LOCALVERSION}"


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


def package_kernel(folder: Path, config: str = CLOUD, key: Path | None = None) -> list[Path]:
    """The patched kernel, and its headers if it has modules.

    ``config``: cloud (Debian's), lab-server, small (as the lab boots it), or a file. ``key``: a PEM
    file with a private key and its certificate, which sign the modules and the image.
    """
    if key:
        check_key(key)
    if config == SMALL:
        if key:
            why = "the small kernel is for the lab's guests, and has no modules"
            raise UsageError("Bad --sign", why, "use --config cloud, lab-server or a file")
        image = build.build_linux("knownzero")
        release = str(metadata(image)["release"])
        kernel = Kernel(
            release, _boot_files(image, image.parent / ".config", image.parent, release)
        )
        needs: tuple[str, ...] = ()
    else:
        kernel = _kernel_with_modules(config, key)
        needs = ("kmod", "linux-base", "initramfs-tools | linux-initramfs-tool")
    name, release = kernel.name("image"), shlex.quote(kernel.release)
    made = deb.Deb(
        name=name,
        version=_version(),
        description="Linux that does not zero memory which is known to be zero",
        about="A kernel with the Knownzero series: it does not zero free memory again that the "
        "host zeroed, or that was zeroed in spare CPU time.",
        items=[*kernel.items, *_licence_of_linux(name)],
        section="kernel",
        depends=needs,
        scripts={when: HOOKS.format(when=when, release=release) for when in ("postinst", "postrm")},
    )
    packages = [deb.write(made, folder)]
    return packages + ([_package_headers(folder, kernel, kernel.headers)] if kernel.headers else [])


def _package_headers(folder: Path, kernel: Kernel, headers: Path) -> Path:
    """The package that DKMS and other builds of modules need."""
    name, place = kernel.name("headers"), f"usr/src/linux-headers-{kernel.release}"
    files = [file for file in sorted(headers.rglob("*")) if file.is_file()]
    items = [
        deb.Item(
            file,
            f"{place}/{file.relative_to(headers)}",
            0o755 if os.access(file, os.X_OK) else 0o644,
        )
        for file in files
    ]
    made = deb.Deb(
        name=name,
        version=_version(),
        description="Headers to build modules for Linux with the Knownzero series",
        about=f"Programs and headers for modules of {kernel.release}, for DKMS also.",
        items=[*items, *_licence_of_linux(name)],
        section="kernel",
        depends=("gcc", "make"),
        links={f"usr/lib/modules/{kernel.release}/build": f"/{place}"},
    )
    return deb.write(made, folder)


def _version() -> str:
    return fetch.obtain("linux").version + revision()


def _licence_of_linux(name: str) -> list[deb.Item]:
    return _licences(name, [fetch.pristine(fetch.obtain("linux")) / "COPYING"])


def _licences(name: str, files: list[Path]) -> list[deb.Item]:
    place = f"usr/share/doc/{name}"
    if len(files) == 1:
        return [deb.Item(files[0], f"{place}/copyright")]
    return [deb.Item(file, f"{place}/copyright.{file.name}") for file in files]


def _boot_files(image: Path, config: Path, built: Path, release: str) -> list[deb.Item]:
    return [
        deb.Item(image, f"boot/vmlinuz-{release}"),
        deb.Item(config, f"boot/config-{release}"),
        deb.Item(built / "System.map", f"boot/System.map-{release}", 0o600),
    ]


def check_key(key: Path) -> None:
    """UsageError for a file that has no private key or no certificate."""
    try:
        text = key.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Bad --sign: {key}", str(error), "name a PEM file") from error
    if not all(
        re.search(f"^-----BEGIN {part}-----$", text, re.MULTILINE)
        for part in (".*PRIVATE KEY", "CERTIFICATE")
    ):
        why = "it needs a private key and its certificate, both in PEM"
        fix = "join them: cat MOK.key MOK.pem > FILE (docs/how-to/turn-it-on.md)"
        raise UsageError(f"Bad --sign: {key}", why, fix)


def needed() -> dict[str, list[str]]:
    """The options that a guest of a distribution needs, by purpose."""
    found: dict[str, list[str]] = tomllib.loads(NEEDED.read_text(encoding="utf-8"))["needed"]
    return found


def lacking(config: str) -> list[str]:
    """The purposes for which a .config lacks options, each with those options."""
    have = set(re.findall(r"^CONFIG_(\w+)=[ym]$", config, re.MULTILINE))
    missing = {why: [name for name in names if name not in have] for why, names in needed().items()}
    return [f"{why} ({', '.join(names)})" for why, names in missing.items() if names]


def given_config(config: str) -> Path:
    """The file that a kernel with modules is configured from.

    UsageError for a name that is no file.
    """
    if config == SERVER:
        return paths.REPO / "linux" / "configs" / "lab-server.config"
    if config == CLOUD:
        return stock.cloud_config()
    if not Path(config).is_file():
        why, fix = "no such file", f"use {CLOUD}, {SERVER}, {SMALL} or a .config"
        raise UsageError(f"Bad --config: {config}", why, fix)
    return Path(config)


def configure(tree: Path, obj: Path, config: str, key: Path | None, log: Path) -> None:
    """Make obj/.config; LabError if Debian's configuration lost options that a guest needs."""
    given = given_config(config)
    more = SIGNED + f'{KEY_OF_MODULES}="{key.absolute()}"\n' if key else ""
    if config == SERVER:
        files = build.fragments("knownzero", "x86_64", str(given))
        if key:
            obj.mkdir(parents=True, exist_ok=True)
            lock.write_atomically(obj / "signed.config", more)
            files.append(obj / "signed.config")
        build.configure_linux(tree, obj, files, "x86_64", log)
        return
    # Of the key, only the path of the distribution's.
    without = (*NOT_TAKEN_OVER, *((KEY_OF_MODULES,) if key else NOT_WITHOUT_KEY))
    build.adopt_config(tree, obj, given, without, LOCALVERSION, log, more)
    missing = lacking((obj / ".config").read_text(encoding="utf-8"))
    if missing and config == CLOUD:
        what = f"{given.name}: a guest would lack {'; '.join(missing)}"
        raise LabError(
            what, "Kconfig turned these options off", "use another --config, and report it"
        )
    if missing:
        progress.note(f"{given.name} lacks: {'; '.join(missing)}")


def _kernel_with_modules(config: str, key: Path | None) -> Kernel:
    kind = config if config in (SERVER, CLOUD) else "custom"
    name = kind + ("-signed" if key else "")
    given = given_config(config)
    progress.note(f"{given.name}: on two CPUs this takes {HOW_LONG[kind]}")
    tools.need("linux", "package", *(("signing",) if key else ()))
    source = fetch.obtain("linux")
    log = paths.log_file(f"package-kernel-{name}")
    with (
        lock.locked(f"build-linux-package-{name}"),
        apply.working_copy(parts.get("linux"), source) as tree,
    ):
        obj = paths.sub("obj") / f"linux-{source.key[:8]}-package-{name}"
        configure(tree, obj, config, key, log)
        what = f"building linux {source.version} with {given.name}, modules and all"
        with progress.step(what, log):
            build.make_targets(tree, obj, ["bzImage", "modules"], log)
        release = (obj / "include/config/kernel.release").read_text(encoding="utf-8").strip()
        with (
            progress.step("installing the modules", log),
            lock.new_directory(obj / "modules") as staging,
        ):
            options = [
                f"INSTALL_MOD_PATH={staging}",
                "INSTALL_MOD_STRIP=1",
                f"DEPMOD={stock.depmod()}",
            ]
            build.make_targets(tree, obj, [*options, "modules_install"], log)
        with (
            progress.step("collecting the headers", log),
            lock.new_directory(obj / "headers") as staging,
        ):
            script = tree / "scripts" / "package" / "install-extmod-build"
            command = shlex.join(["sh", str(script), str(staging)])
            build.make_targets(tree, obj, ["run-command", f"KBUILD_RUN_COMMAND={command}"], log)
    image = obj / "arch" / "x86" / "boot" / "bzImage"
    if key:
        image = _signed(image, key, obj / "vmlinuz.signed", log)
    text = (obj / ".config").read_text(encoding="utf-8")
    lock.write_atomically(
        obj / "config", re.sub(rf"^{KEY_OF_MODULES}=.*", f'{KEY_OF_MODULES}=""', text, flags=re.M)
    )
    items = _boot_files(image, obj / "config", obj, release)
    modules = obj / "modules"
    files = [
        file for file in sorted(modules.rglob("*")) if file.is_file() and not file.is_symlink()
    ]
    items += [deb.Item(file, f"usr/{file.relative_to(modules)}") for file in files]
    return Kernel(release, items, obj / "headers")


def _signed(image: Path, key: Path, target: Path, log: Path) -> Path:
    """The image with a signature for Secure Boot."""
    argv: run.Argv = ["sbsign", "--key", key, "--cert", key, "--output", target, image]
    run.logged(argv, log, "cannot sign the kernel", "check that the key belongs to the certificate")
    return target
