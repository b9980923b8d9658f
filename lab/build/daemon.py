# SPDX-License-Identifier: GPL-2.0
"""The vhost-user balloon: build it with cargo, run it beside a guest, query its control socket."""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.core import lock, paths, progress, run
from lab.core.errors import USAGE, LabError
from lab.machine import tools

WORKSPACE = paths.REPO / "vhost-user-balloon"
NAME = "vhost-user-balloon"
PROFILES = {"dev": "debug", "release": "release"}
START = 10.0  # seconds the daemon gets to listen


def target_dir() -> Path:
    """Cargo's folder for this checkout."""
    return paths.sub("obj", f"rust-{hashlib.sha256(str(WORKSPACE).encode()).hexdigest()[:8]}")


def cargo(arguments: list[str], log: Path, what: str, timeout: float | None = None) -> None:
    """Run cargo in the workspace, with the locked versions; raises LabError when it fails."""
    tools.need("daemon")
    quiet = {"CARGO_TERM_COLOR": "never", "CARGO_TERM_PROGRESS_WHEN": "never"}
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target_dir()), **quiet}
    fix = "correct the first error above (the log has the rest)"
    with lock.locked("cargo"):
        run.logged(
            ["cargo", *arguments], log, what, fix, cwd=WORKSPACE, env=environment, timeout=timeout
        )


def build(profile: str = "dev") -> Path:
    """The daemon's binary. Dev builds are quick; benches measure release builds."""
    log = paths.log_file(f"daemon-{profile}")
    with progress.step(f"building the vhost-user daemon ({profile})", log):
        cargo(
            ["build", "--locked", "--profile", profile, "-p", NAME],
            log,
            "the daemon does not build",
        )
    return program(profile)


def program(profile: str) -> Path:
    """The file that ``build`` makes."""
    return target_dir() / PROFILES[profile] / NAME


def build_lying() -> Path:
    """The daemon with the option lie, for tests; it shares its dependencies with ``build``."""
    name = f"{NAME}-lying"
    argv = ["build", "--locked", "-p", NAME, "--features", "lying", "--bin", name]
    cargo(argv, paths.log_file("daemon-lying"), "the lying device does not build")
    return target_dir() / "debug" / name


def ask(control: Path, **request: object) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(15 + float(str(request.get("timeout", 0))))
        connection.connect(str(control))
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as answers:
            answer: dict[str, Any] = json.loads(answers.readline())
    return answer


class Daemon:
    """A daemon that runs, with its sockets in a folder of its own."""

    def __init__(self, binary: Path, arguments: list[str], folder: Path | None = None) -> None:
        # A path of a unix socket has little room: not in the folder of the logs.
        self._temporary = tempfile.TemporaryDirectory(prefix="kz-vub-")
        self.folder = Path(self._temporary.name)
        self.socket = self.folder / "front"
        self.control = self.folder / "control"
        self.log = (folder or self.folder) / "daemon.log"
        self._argv = [
            str(binary),
            "--socket-path",
            str(self.socket),
            "--control",
            str(self.control),
        ]
        self._argv += arguments
        self.restart()

    def restart(self, *arguments: str) -> None:
        """Start it, again on the same sockets, with more arguments."""
        with self.log.open("ab") as log:
            argv = [*self._argv, *arguments]
            run.show(argv)
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                bufsize=0,
                preexec_fn=run.die_with_parent,
                start_new_session=True,
            )
        deadline = time.monotonic() + START
        # A killed daemon leaves its socket behind: only an answer counts.
        while True:
            with contextlib.suppress(OSError, ValueError):
                if self.status()["ok"]:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                said = self.log.read_text(errors="replace").strip() or "it printed nothing"
                what, bad = "the vhost-user daemon does not start", self.process.wait() == USAGE
                fix = "correct its options" if bad else f"run: {' '.join(self._argv)}"
                raise LabError(what, said, fix, USAGE if bad else None)
            time.sleep(0.005)

    def ask(self, **request: object) -> dict[str, Any]:
        return ask(self.control, **request)

    def status(self) -> dict[str, Any]:
        return self.ask(command="status")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> int:
        """End it if it still runs; returns its exit code (negative: the signal)."""
        if self.process.poll() is None:
            run.end_group(self.process, 5.0)
        with contextlib.suppress(OSError):
            self._temporary.cleanup()
        return self.process.returncode
