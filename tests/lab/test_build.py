# SPDX-License-Identifier: GPL-2.0
"""Fragments mean what they say, and only whole builds enter the cache."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.build import linux as build
from lab.core import lock, paths
from lab.machine import arches, tools

SYMBOL = st.from_regex(r"CONFIG_[A-Z0-9_]{1,12}", fullmatch=True)
VALUE = st.sampled_from(["y", "n", "8", '"text"'])


@given(st.dictionaries(SYMBOL, VALUE, max_size=8))
def test_a_config_that_is_as_asked_has_lost_nothing(wanted: dict[str, str]) -> None:
    final = "".join(f"# {n} is not set\n" if v == "n" else f"{n}={v}\n" for n, v in wanted.items())
    assert build.lost(wanted, final) == []


@given(st.dictionaries(SYMBOL, VALUE, min_size=1, max_size=8), st.data())
def test_a_lost_symbol_is_named(wanted: dict[str, str], data: st.DataObject) -> None:
    victim = data.draw(st.sampled_from(sorted(wanted)))
    other = data.draw(VALUE.filter(lambda value: value != wanted[victim]))
    final = "".join(f"{n}={v}\n" for n, v in {**wanted, victim: other}.items() if v != "n")
    assert [item.split("=")[0] for item in build.lost(wanted, final)] == [victim]


def test_fragments_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("# a comment\nCONFIG_A=y\nCONFIG_B=y\n\n")
    (tmp_path / "b").write_text("# CONFIG_A is not set\nCONFIG_C=8\n")
    assert build.requested([tmp_path / "a", tmp_path / "b"]) == {
        "CONFIG_A": "n",
        "CONFIG_B": "y",
        "CONFIG_C": "8",
    }


@pytest.mark.parametrize("arch", arches.EACH)
@pytest.mark.parametrize("variant", build.VARIANTS)
def test_all_variants_share_the_base_configuration(variant: str, arch: str) -> None:
    base = build.requested(build.fragments("base", arch))
    full = build.requested(build.fragments(variant, arch))
    assert {n: full[n] for n in base} == base
    added = set(full) - set(base)
    if variant in ("knownzero", "off"):
        assert all("PAGE_ZEROED" in n or "PREZERO" in n or "REFPAGE" in n for n in added)


@pytest.mark.parametrize("arch", sorted(set(arches.ARCHES) - set(arches.EACH)))
def test_other_architectures_have_the_series_as_well(arch: str) -> None:
    assert build.requested(build.fragments("debug", arch))["CONFIG_PAGE_ZEROED_DEBUG"] == "y"
    about = arches.ARCHES[arch]
    assert about.prefix or about.kbuild == "x86_64"
    assert not about.prefix or tools.TOOLS[arch]


@pytest.mark.parametrize("name", build.configurations())
def test_a_configuration_changes_a_variant(name: str) -> None:
    changed = set()
    for variant in ("debug", "knownzero"):
        files = build.fragments(variant, "x86_64", name)
        assert files[:-1] == build.fragments(variant, "x86_64")
        before = build.requested(files[:-1])
        changed |= {
            symbol
            for symbol, value in build.requested(files[-1:]).items()
            if before.get(symbol) != value
        }
    assert changed


def test_an_object_is_built_where_its_option_is_on(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    text = "obj-y = fork.o \\\n\t    sys_ni.o nsproxy.o\nobj-$(CONFIG_KEXEC_CORE) += kexec_core.o\n"
    (tmp_path / "kernel/Makefile").write_text(text)
    off = "# CONFIG_KEXEC_CORE is not set\n"
    for target in ("kernel/sys_ni.o", "kernel/", "mm/"):
        assert build.has_object(tmp_path, target, off)
    assert not build.has_object(tmp_path, "kernel/kexec_core.o", off)
    assert build.has_object(tmp_path, "kernel/kexec_core.o", "CONFIG_KEXEC_CORE=y\n")


def test_our_options_are_recognised() -> None:
    assert build.ours_on("CONFIG_PAGE_ZEROED=y\nCONFIG_UNACCEPTED_MEMORY_TEST=y\n") == [
        "CONFIG_PAGE_ZEROED",
        "CONFIG_UNACCEPTED_MEMORY_TEST",
    ]
    assert build.ours_on("# CONFIG_PAGE_ZEROED is not set\nCONFIG_PAGE_POISONING=y\n") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_build_leaves_no_image(cache: Path, number: int) -> None:
    script = (
        "import time\nfrom lab.core import lock, paths\n"
        "with lock.new_directory(paths.sub('images') / 'x') as work:\n"
        "    (work / 'half').write_text('half')\n    print('in', flush=True)\n    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(paths.REPO)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        process.wait(10)
    assert not (cache / "images" / "x").exists()


def test_files_are_written_whole_or_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = paths.sub("a") / "file"
    lock.write_atomically(target, "old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        lock.write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in target.parent.iterdir()] == ["file"]


def test_a_build_that_outlives_its_kz_keeps_the_lock(cache: Path, tmp_path: Path) -> None:
    """Else the next kz would build in the same folder beside it."""
    begun, ends = tmp_path / "begun", tmp_path / "ends"
    build = f"touch {begun}; until test -e {ends}; do sleep 0.1; done"
    script = (
        "import sys\nfrom pathlib import Path\nfrom lab.core import lock, run\n"
        "with lock.locked('build-x'):\n"
        "    argv = ['sh', '-c', sys.argv[1]]\n"
        "    run.logged(argv, Path(sys.argv[2]), '', '', pass_fds=lock.held())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(paths.REPO)}
    argv = [sys.executable, "-c", script, build, str(tmp_path / "log")]
    try:
        with subprocess.Popen(argv, env=environment) as process:
            while not begun.exists() and process.poll() is None:
                time.sleep(0.05)
            process.kill()
        with (paths.sub("locks") / "build-x").open("w") as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ends.touch()
            fcntl.flock(file, fcntl.LOCK_EX)
    finally:
        ends.touch()
