# SPDX-License-Identifier: GPL-2.0
"""Debian's Prometheus scrapes the daemon and a guest's zeropages, and answers every query of the
dashboard.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import struct
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.core import paths
from lab.machine import debs
from tests import devices
from tests.guest.test_zeropages import Machine
from tests.hostile.peer import ALL, LIST, MIB, PLAY, REPORTING, STATS, Device, FrontEnd, eventually

pytestmark = pytest.mark.slow
DASHBOARD = paths.REPO / "packaging" / "grafana" / "vhost-user-balloon.json"
HOW_TO = paths.REPO / "docs" / "how-to" / "vhost-user-balloon.md"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@contextlib.contextmanager
def background(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def expressions() -> list[str]:
    """The dashboard's queries for all guests, without the conditions that hide an empty line."""
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [
        variable["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    asked = [re.sub(r"label_values\((\w+), instance\)", r"\1", one) for one in asked]
    return [one.replace("$guest", ".*").removesuffix(" > 0") for one in asked]


def test_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    if shutil.which("systemd-socket-activate") is None:
        pytest.skip("systemd-socket-activate is not installed")
    target, guest, web = free_port(), free_port(), free_port()
    machine = Machine(tmp_path / "guest")
    machine.vmstat |= {
        "pgzeroed_set_reported": 700,
        "pgzeroed_skip": 80,
        "pgzeroed_cleared": 5,
        "pgzeroed_bad": 0,
    }
    (tmp_path / "textfiles").mkdir()
    (tmp_path / "textfiles" / "metrics").write_text(machine.call("--metrics").stdout)
    node_exporter = [sys.executable, "-m", "http.server", str(guest), "--bind", "127.0.0.1"]
    node_exporter += ["--directory", f"{tmp_path}/textfiles"]
    (tmp_path / "config.yml").write_text(
        "global: {scrape_interval: 500ms}\nscrape_configs:\n- job_name: balloon\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n- job_name: guests\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{guest}']}}]\n"
    )
    program = str(debs.unpacked("prometheus") / "usr/bin/prometheus")
    prometheus = [
        program,
        f"--config.file={tmp_path}/config.yml",
        f"--storage.tsdb.path={tmp_path}/data",
    ]
    prometheus.append(f"--web.listen-address=127.0.0.1:{web}")

    def query(expression: str) -> list[Any]:
        text = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{web}/api/v1/query?{text}", timeout=5
            ) as answer:
                answered = json.load(answer)
        except OSError:  # it has just been started
            return []
        assert answered["status"] == "success"
        result: list[Any] = answered["data"]["result"]
        return result

    device = Device(devices.program())
    # The command that the how-to gives, with this daemon's socket.
    documented = re.search(r"^ +(systemd-socket-activate .*)$", HOW_TO.read_text(), re.M)
    assert documented
    proxy = (
        documented[1]
        .replace("/run/vm1/metrics", f"{device.folder}/metrics")
        .replace("9405", str(target))
    )
    try:
        with (
            background(proxy.split(), tmp_path / "proxy.log"),
            background(node_exporter, tmp_path / "node_exporter.log"),
            background(prometheus, tmp_path / "prometheus.log"),
            FrontEnd(device) as vm,
        ):
            vm.start(ALL)
            vm.fill(PLAY, 2 * MIB)
            assert vm.ask(REPORTING, (PLAY, 2 * MIB, True)) in (0, 2 * MIB)
            vm.memory[LIST : LIST + 20] = struct.pack("<HQHQ", 4, 123 * MIB, 5, 456 * MIB)
            vm.put(STATS, (LIST, 20, False))
            vm.kick(STATS)
            discarded = 'vhost_user_balloon_discarded_bytes_total{queue="reporting"}'
            wanted = str(2 * MIB)
            log = (tmp_path / "prometheus.log").read_text
            assert eventually(lambda: [one["value"][1] for one in query(discarded)] == [wanted]), (
                log()
            )
            asked = expressions()
            assert len(asked) >= 15
            for expression in asked:
                assert eventually(lambda expression=expression: query(expression) != []), expression
    finally:
        device.close()
