# SPDX-License-Identifier: GPL-2.0
"""Daemons, front ends and files of silent servers for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import devices
from tests.hostile import fuse
from tests.hostile.peer import Device, FrontEnd

Start = Callable[..., Device]


@pytest.fixture(scope="session")
def binary() -> Path:
    return devices.program("release")


@pytest.fixture
def start(binary: Path) -> Iterator[Start]:
    started: list[Device] = []

    def one(*options: str, **popen: object) -> Device:
        started.append(Device(binary, *options, **popen))
        return started[-1]

    yield one
    for device in started:
        device.close()


@pytest.fixture
def device(start: Start) -> Iterator[Device]:
    """One that serves the next front end when the test is over."""
    one = start()
    yield one
    one.serves()


@pytest.fixture
def vm(device: Device) -> Iterator[FrontEnd]:
    """A front end with a driver that has started."""
    with FrontEnd(device) as one:
        one.start()
        one.works()
        yield one


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[int]:
    folder = tmp_path / "fuse"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(fuse.silent_file(folder))
        except OSError as error:
            pytest.skip(f"no FUSE here: {error}")
        yield fd


@pytest.fixture
def stalling(tmp_path: Path) -> Iterator[fuse.Server]:
    """A server of FUSE with a writeback cache: closing one of its files waits until it is ended."""
    folder = tmp_path / "stalling"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(fuse.served(folder, fuse.WRITEBACK_CACHE))
        except OSError as error:
            pytest.skip(f"no FUSE here: {error}")
        yield server
