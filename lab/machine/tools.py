# SPDX-License-Identifier: GPL-2.0
"""The tools that builds and tests need, and their Debian packages.

``kz`` imports this module before the lab's Python environment exists, so it imports the standard library and the lab's
errors only.
"""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

from lab.core.errors import LabError

# Compilers by ccache, under the names of the real ones.
CCACHE = "/usr/lib/ccache"
# The oldest Rust that compiles the daemon; vhost-user-balloon/Cargo.toml has it, too.
RUST = (1, 88)
# Debian keeps one Rust for a release, and a newer one, for browsers, under other names.
NEWER_RUST = {"cargo": "cargo-web", "rustfmt": "rustfmt-web", "rust-clippy": "rust-web-clippy"}

# What the lab's QEMU, which is the packaged one, has for operators.
FEATURES = tomllib.loads((Path(__file__).parents[2] / "packaging/qemu/features.toml").read_text())["feature"]
# Tools by their user: (a check, the Debian package).
TOOLS: dict[str, tuple[tuple[str, str], ...]] = {
    "linux": (
        ("cc", "gcc"), ("ld", "binutils"), ("make", "make"), ("flex", "flex"), ("bison", "bison"), ("bc", "bc"),
        ("perl", "perl"), ("tar", "tar"), ("xz", "xz-utils"), ("lz4", "lz4"), ("git", "git"), ("dpkg-deb", "dpkg"),
        ("<stdio.h>", "libc6-dev"), ("<gelf.h>", "libelf-dev"),
    ),
    "qemu": (
        ("cc", "gcc"), ("ld", "binutils"), ("make", "make"), ("pkg-config", "pkg-config"), ("git", "git"), ("tar", "tar"),
        ("xz", "xz-utils"), ("dpkg-deb", "dpkg"), ("<stdio.h>", "libc6-dev"), ("glib-2.0.pc", "libglib2.0-dev"), ("<libfdt.h>", "libfdt-dev"),
        *(need for feature in FEATURES for need in feature["needs"].items()),
    ),
    "daemon": (("cargo>=" + ".".join(map(str, RUST)), "cargo"),),
    "daemon's tests": (("cargo-fmt", "rustfmt"), ("cargo-clippy", "rust-clippy")),
    # Building after each patch.
    "steps": ((f"{CCACHE}/gcc", "ccache"),),
    "package": (("dpkg-deb", "dpkg"), ("dpkg-shlibdeps", "dpkg-dev")),
    "stock kernel": (("/sbin/depmod", "kmod"),),
    # A distribution to boot; the last two without root only.
    "debian": (
        ("perl", "perl"), ("tar", "tar"), ("/sbin/mke2fs", "e2fsprogs"),
        *((("fakeroot", "fakeroot"), ("newuidmap", "uidmap")) if os.geteuid() else ()),
    ),
    # Kernels of other architectures, and programs for them.
    "arm64": (
        ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
        ("/usr/aarch64-linux-gnu/include/stdio.h", "libc6-dev-arm64-cross"),
    ),
    "i386": (
        ("i686-linux-gnu-gcc", "gcc-i686-linux-gnu"),
        ("/usr/i686-linux-gnu/include/stdio.h", "libc6-dev-i386-cross"),
    ),
    "riscv": (("riscv64-linux-gnu-gcc", "gcc-riscv64-linux-gnu"),),
}  # fmt: skip
DEMO = ("linux", "qemu")
TESTS = (*DEMO, "daemon", "daemon's tests", "package", "stock kernel")


def has(check: str) -> bool:
    """Whether a tool is installed.

    ``check``: a program, ``program>=major.minor``, a file (by its path), a header ``<x.h>`` or a pkg-config
    file ``x.pc``.
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
        done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


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
        done = subprocess.run(
            ["apt-cache", "policy", *packages], capture_output=True, text=True, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        return {}
    found = re.findall(r"^(\S+):\n(?: .*\n)*? +Candidate: (\S+)$", done.stdout, re.MULTILINE)
    return {name: version for name, version in found if version != "(none)"}


def _newest_rust(packages: list[str], offered: dict[str, str]) -> list[str]:
    """The packages, by the names of a Rust that is new enough."""
    if _numbers(offered.get("cargo", "")) < RUST and "cargo-web" in offered:
        return [NEWER_RUST.get(name, name) for name in packages]
    return packages


def missing(*what: str, update: Callable[[], None] | None = None) -> list[str]:
    """Debian packages that the machine lacks for ``what``; ``update`` fetches apt's lists for a Rust."""
    absent = [package for name in what for check, package in TOOLS[name] if not has(check)]
    if not NEWER_RUST.keys().isdisjoint(absent):
        offered = candidates(list(NEWER_RUST.values()) + list(NEWER_RUST))
        if not offered and update:
            update()
            offered = candidates(list(NEWER_RUST.values()) + list(NEWER_RUST))
        absent = _newest_rust(absent, offered)
    return list(dict.fromkeys(absent))


def need(*what: str) -> None:
    """Install the tools of ``what`` (names in TOOLS) at once, or name the command that does."""
    from lab.machine import apt

    failure = "tools are missing for " + ", ".join(what)
    absent = missing(*what, update=apt.update)
    if not absent:
        return
    apt.install(absent, failure)
    still = missing(*what)
    if still:
        raise LabError(failure, "still missing: " + ", ".join(still), "run `kz doctor`")


def need_compiler(arch: str) -> None:
    """Install the cross compiler of an architecture that needs one, or name the command that does."""
    if arch in TOOLS:
        need(arch)
