"""What TLS costs: the same actor with and without the gateway of docker/gateway between."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import reverb_writer as rw
from benchmarks.actors import Actor, Contender, ours
from benchmarks.comparison import Comparison, Effort
from benchmarks.report import Table
from benchmarks.workloads import Workload, frame_steps, small_steps

_FOLDER = Path(__file__).parent.parent / "docker" / "gateway"
_START_WITHIN_S = 10.0


def gateway(effort: Effort) -> Table:
    """Throughput in plain text and through the gateway, which looks up what each certificate may do."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        from reverb_writer_server.certs import make_certificates

        make_certificates(Path(folder), ["localhost"], ["client"], days=1)
        for name, workload in (
            ("six small leaves, L=20, S=1", Workload(small_steps())),
            ("84 x 84 frames, L=20, S=10", Workload(frame_steps(), stride_length=10)),
        ):
            with Comparison() as comparison:
                comparison.add("plain text", Contender, ours, workload)
                comparison.add("gateway", Contender, _through_gateway, workload, certificates=folder)
                runs = comparison.rounds(effort)
            plain, tls = runs["plain text"].steps_per_s, runs["gateway"].steps_per_s
            rows.append([name, f"{plain:,.0f}", f"{tls:,.0f}", f"{tls / plain:.0%}"])
    return Table(
        "TLS 1.3 with client certificates and permissions, through nginx",
        ["work", "plain text, steps/s", "through the gateway, steps/s", "share"],
        rows,
        "nginx shares the two cores with actor and server.",
    )


def _through_gateway(address: str, workload: Workload, certificates: str) -> Actor:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    environment = {
        "REVERB_ADDRESS": address,
        "GATEWAY_PORT": str(port),
        "GATEWAY_SOURCE": "127.0.0.2",
        "CERTIFICATES": str(Path(certificates) / "gateway"),
        "PERMISSIONS": str(_FOLDER / "permissions.txt"),
    }
    with contextlib.ExitStack() as undo:
        line, variables = [str(_FOLDER / "run")], {**os.environ, **environment}
        process = undo.enter_context(subprocess.Popen(line, env=variables, stderr=subprocess.DEVNULL))
        undo.callback(process.terminate)
        _wait_for(port)
        folder = Path(certificates) / "clients"
        tls = rw.TLS(folder / "ca.crt", folder / "client.crt", folder / "client.key")
        client = undo.enter_context(rw.Client(f"localhost:{port}", tls))
        actor = ours(client, workload)
        undo.callback(actor.close)
        return replace(actor, close=undo.pop_all().close)


def _wait_for(port: int) -> None:
    end = time.monotonic() + _START_WITHIN_S
    while time.monotonic() < end:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("nginx does not listen; is it installed?")
