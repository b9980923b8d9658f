# SPDX-License-Identifier: GPL-2.0
"""The Rust workspace: formatted, without a warning, and every test of its own."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.build import daemon
from lab.core import paths
from lab.core.run import Argv
from tests import devices
from tests.kernel import unchanged

pytestmark = pytest.mark.slow
TESTS = paths.REPO / "tests"
# The daemon does not use this feature of the crate for other VMMs.
FEATURES = ["--features", "balloon-discard/vm-memory"]


def test_formatted() -> None:
    log = paths.log_file("rustfmt")
    daemon.cargo(["fmt", "--all", "--check"], log, "the Rust sources are not formatted", 120)


def test_no_warnings() -> None:
    log = paths.log_file("clippy")
    arguments = ["clippy", "--locked", "--workspace", *FEATURES, "--all-targets"]
    what = "clippy finds fault with the Rust sources"
    daemon.cargo([*arguments, "--", "-D", "warnings"], log, what, 800)


@pytest.mark.parametrize("crate", ["protocol", "discard", "daemon"])
def test_d14_names_and_dependencies(crate: str) -> None:
    """Names of the field; and the code uses each crate that it depends on."""
    folder = daemon.WORKSPACE / crate
    text = "\n".join(path.read_text() for path in (folder / "src").rglob("*.rs"))
    assert re.findall(r"(?:\b|_)(?:told|bell|vouched|Gone)(?:\b|_)", text) == []
    manifest = tomllib.loads((folder / "Cargo.toml").read_text())
    names = [name.replace("-", "_") for name in manifest.get("dependencies", {})]
    assert [name for name in names if not re.search(rf"\b{name}(::|\()", text)] == []
    workspace = (daemon.WORKSPACE / "Cargo.toml").read_text()
    assert "backend-atomic" not in workspace


def test_d14_one_outlet_for_metrics() -> None:
    text = subprocess.run(
        [devices.program(), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"--[a-z-]*metrics[a-z-]*", text)) == {"--metrics-socket"}


def test_tests_from_outside_run_the_named_daemon() -> None:
    """With a build of its own instead of KNOWNZERO_DAEMON, a test passes with every mutant."""
    sources = [file for name in ("hostile", "rust") for file in (TESTS / name).glob("*.py")]
    builds = "daemon." + "build("
    # test_lying.py builds both profiles, to see that neither has the option --lie.
    assert [file.name for file in sources if builds in file.read_text()] == ["test_lying.py"]


def test_its_own_tests(record_property: Callable[[str, object], None]) -> None:
    pages = paths.REPO / "packaging" / "man"  # daemon/tests/man.rs reads them
    inputs = [daemon.WORKSPACE, Path(__file__), pages]
    with unchanged.since_it_passed("cargo-test", inputs) as same:
        record_property("unchanged since it passed", same)
        if same:
            return
        log = paths.log_file("cargo-test")
        daemon.cargo(
            ["test", "--locked", "--workspace", *FEATURES],
            log,
            "a test of the Rust workspace fails",
            800,
        )
        results = re.findall(
            r"^test result: ok\. (\d+) passed; 0 failed; (\d+) ignored", log.read_text(), re.M
        )
        assert sum(int(ignored) for _, ignored in results) == 0
        # The protocol's properties and doctest, discarding, the device, hostile peers, the program,
        # the pages.
        assert sum(int(passed) for passed, _ in results) >= 100
        assert "Doc-tests balloon_protocol" in log.read_text()
        assert "memory_of_which_nothing_is_known_is_left_out ... ok" in log.read_text()


def test_the_crates_for_vmm_authors() -> None:
    log = paths.log_file("cargo-package")
    crates = ["-p", "balloon-protocol", "-p", "balloon-discard"]
    daemon.cargo(
        ["package", "--offline", "--allow-dirty", *crates], log, "a crate cannot be packaged", 400
    )
    # Documented without a warning; the tests of the workspace compile the examples.
    daemon.cargo(
        ["doc", "--locked", "--no-deps", *crates], log, "a crate cannot be documented", 400
    )
    assert "warning" not in log.read_text()
    example = ["run", "--locked", "-p", "balloon-discard", "--example", "device"]
    daemon.cargo(example, log, "the example of a VMM's device fails", 400)
    assert "pages 2 and 3 and the reports read as zero" in log.read_text()
    source = (daemon.WORKSPACE / "discard" / "examples" / "device.rs").read_text()
    assert len(source.splitlines()) <= 120
    assert "use balloon_discard::" in source and "use balloon_protocol::" in source


def test_licences_and_duplicates() -> None:
    """What cargo-deny checks offline, by the same file; advisories need its database."""
    rules = tomllib.loads((daemon.WORKSPACE / "deny.toml").read_text())
    argv = [
        "cargo",
        "metadata",
        "--locked",
        "--format-version=1",
        "--filter-platform=x86_64-unknown-linux-gnu",
    ]
    done = subprocess.run(argv, cwd=daemon.WORKSPACE, capture_output=True, check=True)
    data = json.loads(done.stdout)
    used = {node["id"] for node in data["resolve"]["nodes"]}
    packages = [package for package in data["packages"] if package["id"] in used]
    allowed = set(rules["licenses"]["allow"])
    for package in packages:
        # Each part of an AND needs an alternative that is allowed.
        parts = re.split(r" AND ", package["license"].replace("/", " OR "))
        for part in parts:
            assert allowed & set(re.split(r" OR ", part.strip("()"))), package["name"]
    versions: dict[str, set[str]] = {}
    for package in packages:
        versions.setdefault(package["name"], set()).add(package["version"])
    skipped = {entry["crate"] for entry in rules["bans"]["skip"]}
    # Exactly the ones that are skipped are there twice.
    twice = {name for name, found in versions.items() if len(found) > 1}
    assert twice == {name.partition("@")[0] for name in skipped}


@pytest.mark.nightly
@pytest.mark.parametrize("word", ["", "BSD-3-Clause"])
def test_cargo_deny(word: str, tmp_path: Path) -> None:
    """cargo-deny agrees; without one of the licences in its file, it does not.

    Advisories need a database from outside.
    """
    place, version = paths.sub("cargo-deny"), "0.20.2"
    program, log = place / "bin" / "cargo-deny", paths.log_file("cargo-deny")
    if not program.is_file():
        install = ["install", "cargo-deny", "--locked", "--version", version, "--root", str(place)]
        daemon.cargo(install, log, f"cargo-deny {version} cannot be installed")
    rules = tmp_path / "deny.toml"
    text = (daemon.WORKSPACE / "deny.toml").read_text()
    rules.write_text(text.replace(f' "{word}",', "") if word else text)
    argv: Argv = [program, "--locked", "--config", rules, "check", "licenses", "bans", "sources"]
    done = subprocess.run(argv, cwd=daemon.WORKSPACE, capture_output=True, text=True, check=False)
    verdict = f"bans ok, licenses {'FAILED' if word else 'ok'}, sources ok"
    assert verdict in done.stdout + done.stderr, done.stdout + done.stderr


def test_the_daemon_is_built_and_runs() -> None:
    with devices.running(["--target", "1M"]) as device:
        status = device.status()
        assert status["ok"] is True
        assert status["problems"] == ["no front end is connected"]
        assert status["sandbox"].startswith("seccomp, ")
    assert device.process.returncode == 0
