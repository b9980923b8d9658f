# SPDX-License-Identifier: GPL-2.0
"""The tools that builds and tests need, and their Debian packages.

Imports the standard library and the lab's errors only: ``kz`` imports it before the lab's
environment exists.
"""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

from lab.core.errors import LabError
from lab.machine import arches

# Compilers by ccache, under the names of the real ones.
CCACHE = "/usr/lib/ccache"
# The oldest Rust that compiles the daemon; vhost-user-balloon/Cargo.toml has it, too.
RUST = (1, 88)
# Debian keeps one Rust for a release, and a newer one, for browsers, under other names.
NEWER_RUST = {"cargo": "cargo-web", "rustfmt": "rustfmt-web", "rust-clippy": "rust-web-clippy"}

# Features of QEMU for operators. `kz package qemu` packages the QEMU of the lab's guests.
FEATURES = tomllib.loads((Path(__file__).parents[2] / "packaging/qemu/features.toml").read_text())[
    "feature"
]
NEEDS: dict[str, str] = {
    package: check for one in FEATURES for check, package in one["needs"].items()
}
# The packages for each user of them.
COMPILE = ("gcc", "binutils", "make", "git", "tar", "xz-utils", "dpkg", "libc6-dev")
TOOLS: dict[str, tuple[str, ...]] = {
    "linux": (*COMPILE, "flex", "bison", "bc", "perl", "lz4", "libelf-dev", "ccache"),
    "qemu": (
        *COMPILE,
        "pkg-config",
        "libglib2.0-dev",
        "libfdt-dev",
        "device-tree-compiler",
        *NEEDS,
    ),
    "daemon": ("cargo",),
    "daemon's tests": ("rustfmt", "rust-clippy", "strace"),
    "package": ("dpkg", "dpkg-dev"),
    "signing": ("libssl-dev", "sbsigntool"),
    "stock kernel": ("kmod",),
    # A distribution to boot; the last two without root only.
    "debian": ("perl", "tar", "e2fsprogs", *(("fakeroot", "uidmap") if os.geteuid() else ())),
    # Kernels of other architectures, and programs for them.
    "arm": ("gcc-arm-linux-gnueabihf",),
    "powerpc": ("gcc-powerpc64le-linux-gnu",),
    "s390": ("gcc-s390x-linux-gnu",),
    **arches.CROSS,
}
# How ``has`` finds a package without a program of its name.
CHECKS: dict[str, str] = NEEDS | {
    "gcc": "cc",
    "binutils": "ld",
    "xz-utils": "xz",
    "libc6-dev": "<stdio.h>",
    "libelf-dev": "<gelf.h>",
    "libglib2.0-dev": "glib-2.0.pc",
    "libfdt-dev": "<libfdt.h>",
    "device-tree-compiler": "dtc",
    "cargo": "cargo>=" + ".".join(map(str, RUST)),
    "rustfmt": "cargo-fmt",
    "rust-clippy": "cargo-clippy",
    "dpkg-dev": "dpkg-shlibdeps",
    "e2fsprogs": "/sbin/mke2fs",
    "uidmap": "newuidmap",
    "libssl-dev": "<openssl/ssl.h>",
    "sbsigntool": "sbsign",
    "libc6-dev-arm64-cross": "/usr/aarch64-linux-gnu/include/stdio.h",
    "libc6-dev-i386-cross": "/usr/i686-linux-gnu/include/stdio.h",
}
DEMO = ("linux", "qemu")
TESTS = (*DEMO, "daemon", "daemon's tests", "package", "stock kernel")


def has(check: str) -> bool:
    """Whether this is installed.

    A program, ``program>=1.88``, a file's path, a header ``<x.h>``, a pkg-config ``x.pc``.
    """
    if check.startswith("/"):
        return Path(check).is_file()
    if check.startswith("<"):
        return _works(["cc", "-E", "-"], f"#include {check}\n")
    if check.endswith(".pc"):
        return _works(["pkg-config", "--exists", check[:-3]])
    program, _, least = check.partition(">=")
    if least:
        return version(program) >= _numbers(least)
    return shutil.which(program) is not None


def _works(argv: list[str], text: str = "") -> bool:
    try:
        return not subprocess.run(
            argv, input=text, capture_output=True, text=True, check=False
        ).returncode
    except FileNotFoundError:
        return False


def _numbers(text: str) -> tuple[int, ...]:
    found = re.search(r"\d+\.\d+", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def version(program: str) -> tuple[int, ...]:
    """(major, minor) by ``program --version``; empty when it does not run or prints none."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ()
    return _numbers(done.stdout) if done.returncode == 0 else ()


def candidates(packages: list[str]) -> dict[str, str]:
    """The versions that the machine's apt would install, of the packages that it knows."""
    try:
        argv, environment = ["apt-cache", "policy", *packages], {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        return {}
    found = re.findall(r"^(\S+):\n(?: .*\n)*? +Candidate: (\S+)$", done.stdout, re.MULTILINE)
    return {name: version for name, version in found if version != "(none)"}


def missing(*what: str, update: Callable[[], None] | None = None) -> list[str]:
    """Debian packages that the machine lacks for ``what``.

    ``update`` fetches apt's lists for a Rust.
    """
    # A package without a check is a cross compiler, or has a program of its name.
    checks = {
        one: re.sub("^gcc-(.+)", r"\1-gcc", one) for name in what for one in TOOLS[name]
    } | CHECKS
    absent = [one for name in what for one in TOOLS[name] if not has(checks[one])]
    if not NEWER_RUST.keys().isdisjoint(absent):
        names = [*NEWER_RUST.values(), *NEWER_RUST]
        offered = candidates(names)
        if not offered and update:
            update()
            offered = candidates(names)
        if _numbers(offered.get("cargo", "")) < RUST and "cargo-web" in offered:
            absent = [NEWER_RUST.get(name, name) for name in absent]
    return list(dict.fromkeys(absent))


def can_have_rust() -> bool:
    """Whether a Rust that compiles the daemon is installed, or this user can install it."""
    from lab.machine import apt

    if not (absent := missing("daemon", update=apt.update)):
        return True
    newest = max((_numbers(one) for one in candidates(absent).values()), default=())
    return newest >= RUST and apt.may_install() is not None


def need(*what: str) -> None:
    """Install the tools of ``what`` (names in TOOLS) at once, or name the command that does."""
    from lab.machine import apt

    failure = "tools are missing for " + ", ".join(what)
    if not (absent := missing(*what, update=apt.update)):
        return
    apt.install(absent, failure)
    if still := missing(*what):
        raise LabError(
            failure,
            "still missing: " + ", ".join(CHECKS.get(one, one) for one in still),
            "run `kz doctor`",
        )


def need_compiler(arch: str) -> None:
    """Install the cross compiler of an architecture that needs one, or name the command."""
    if arch in TOOLS:
        need(arch)
