# SPDX-License-Identifier: GPL-2.0
"""Packages hold what they say, and what is in them runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lab.boot.guest import boot
from lab.boot.spec import BootSpec
from lab.build import deb, package
from lab.core.errors import UsageError
from lab.core.paths import REPO
from lab.core.run import output
from lab.machine import fetch
from lab.patches import apply, parts
from tests.operators.packages import unpacked_qemu


def fields(file: Path) -> dict[str, str]:
    """The control file."""
    told = output(["dpkg-deb", "-f", str(file)], "no control file", "make it again")
    lines = [line for line in told.splitlines() if not line.startswith(" ")]
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def unpacked(file: Path, target: Path) -> Path:
    subprocess.run(["dpkg-deb", "-x", file, target], check=True)
    return target


def test_a_package_has_its_files_links_and_scripts(tmp_path: Path) -> None:
    source = tmp_path / "program"
    source.write_text("#!/bin/sh\necho hello\n", encoding="utf-8")
    made = deb.write(
        deb.Deb(
            name="a-name",
            version="1.0+x2",
            description="A line",
            about="More about a-name. " * 20,
            items=[deb.Item(source, "usr/lib/a/program", 0o755)],
            depends=("libc6 (>= 2.34)",),
            links={"usr/bin/a": "../lib/a/program"},
            scripts={"postinst": "#!/bin/sh\ntrue\n"},
        ),
        tmp_path / "out",
    )
    assert made.name == f"a-name_1.0+x2_{deb.architecture()}.deb"
    # apt's own user reads it.
    assert made.stat().st_mode & 0o777 == 0o644
    told = fields(made)
    assert (told["Package"], told["Version"], told["Depends"]) == (
        "a-name",
        "1.0+x2",
        "libc6 (>= 2.34)",
    )
    root = unpacked(made, tmp_path / "root")
    assert output([root / "usr/bin/a"], "does not run", "mend it") == "hello\n"
    listing = output(["dpkg-deb", "-c", str(made)], "no list", "make it again")
    assert all("root/root" in line for line in listing.splitlines())
    scripts = output(["dpkg-deb", "-I", str(made), "postinst"], "no script", "make it again")
    assert scripts == "#!/bin/sh\ntrue\n"


@pytest.mark.slow
def test_the_daemon_runs_from_its_package(tmp_path: Path) -> None:
    made = package.package_daemon(tmp_path / "out", "dev")
    assert "libc6" in fields(made)["Depends"]
    root = unpacked(made, tmp_path / "root")
    assert "balloon" in output(
        [root / "usr/bin/vhost-user-balloon", "--print-capabilities"], "no", "mend it"
    )
    assert (root / "usr/share/man/man1/vhost-user-balloon.1").is_file()
    assert (root / "usr/lib/systemd/system/vhost-user-balloon@.service").is_file()
    for script in ("postinst", "postrm", "prerm"):
        text = output(["dpkg-deb", "--info", made, script], "no script", "mend it")
        subprocess.run(["sh", "-n"], input=text.encode(), check=True)
        assert "systemctl" in text


@pytest.mark.boots
def test_kernel_and_qemu_run_from_their_packages(tmp_path: Path) -> None:
    """Unpacked, as apt would: memory is reported, and not zeroed again."""
    root = unpacked_qemu(tmp_path).parent
    (image,) = package.package_kernel(tmp_path / "out", "small")
    unpacked(image, root)
    (kernel,) = (root / "boot").glob("vmlinuz-*")
    release = kernel.name.removeprefix("vmlinuz-")
    assert (root / f"boot/config-{release}").is_file()
    result = boot(
        BootSpec(
            kernel=kernel,
            qemu=root / "usr/bin/qemu-system-x86_64-knownzero",
            memory="1G",
            devices=["virtio-balloon-pci,free-page-reporting=on"],
            command=[
                "sh",
                "-ec",
                "uname -r; echo 0 > /sys/kernel/mm/page_reporting/flush; "
                "grep -E 'pgzeroed_set_reported [1-9]' /proc/vmstat",
            ],
        )
    )
    assert result.exit_code == 0, result.stdout
    assert result.stdout.splitlines()[0] == release


KEY = """-----BEGIN PRIVATE KEY-----
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
-----END CERTIFICATE-----
"""


def test_a_key_needs_its_certificate_and_modules(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text(KEY)
    package.check_key(key)
    with pytest.raises(UsageError, match="--config cloud"):
        package.package_kernel(tmp_path, package.SMALL, key)
    for text in (
        KEY.replace("PRIVATE KEY", "PUBLIC KEY"),
        KEY.replace("CERTIFICATE", "DH PARAMETERS"),
    ):
        key.write_text(text)
        with pytest.raises(UsageError, match="MOK"):
            package.check_key(key)


def test_the_documented_key_is_accepted(tmp_path: Path) -> None:
    page = (REPO / "docs/how-to/turn-it-on.md").read_text(encoding="utf-8")
    section = page.partition("## Secure Boot")[2].partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    for line in lines:
        if not line.startswith(("./kz", "sudo")):
            subprocess.run(["sh", "-ec", line], cwd=tmp_path, check=True, capture_output=True)
    (name,) = (line.split()[-1] for line in lines if line.startswith("./kz package kernel --sign"))
    package.check_key(tmp_path / name)
    (name,) = (line.split()[-1] for line in lines if "mokutil --import" in line)
    assert (tmp_path / name).stat().st_size > 500


@pytest.mark.slow
@pytest.mark.parametrize("signed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_debians_configuration_keeps_what_a_guest_needs(tmp_path: Path, signed: bool) -> None:
    """With our source, series and compiler.

    `configure` fails if an option of needed.toml is lost.
    """
    key = tmp_path / "key.pem"
    with apply.working_copy(parts.get("linux"), fetch.obtain("linux")) as tree:
        package.configure(
            tree, tmp_path / "obj", package.CLOUD, key if signed else None, tmp_path / "log"
        )
    config = (tmp_path / "obj" / ".config").read_text(encoding="utf-8").splitlines()
    assert package.lacking("\n".join(config)) == []
    assert 'CONFIG_LOCALVERSION="-knownzero"' in config
    # A distribution's kernel has about 1,000 modules.
    assert sum(line.endswith("=m") for line in config) > 900
    for line in (
        "CONFIG_MODULE_SIG_ALL=y",
        f'CONFIG_MODULE_SIG_KEY="{key}"',
        "CONFIG_SECURITY_LOCKDOWN_LSM=y",
    ):
        assert (line in config) == signed
