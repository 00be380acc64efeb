"""A real etcd for one test: its own folder and ports, stopped, killed and started again at will."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

from elasticrun.config import Tls
from tests import needs
from tests.harness import LIMIT, clean_environment, free_port, is_alive, until_file
from tests.hooked import hooked

LEASE = 10
"""Seconds of a leadership here: a stall of etcd or of a master that is shorter costs no change of
masters, which these tests count."""

_PATIENT = f"""
import sys

if "elasticrun.master" in sys.orig_argv:
    from elasticrun.master import etcd_store

    etcd_store.LEADER_TTL = {LEASE}
    etcd_store.CAMPAIGN_LIMIT = {LIMIT}
"""


def patient_masters() -> dict[str, str]:
    """The variables with which what is started gives its masters such a leadership."""
    return hooked(_PATIENT)


class EtcdServer:
    """One member, a cluster of its own, on loopback."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self._lives = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self._peer = 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"etcd://{self.address}"

    @property
    def etcdctl(self) -> tuple[str, ...]:
        """etcd's own tool, for this server; by itself it gives up after 2 s."""
        patient = (f"--{limit}-timeout={LIMIT:g}s" for limit in ("dial", "command"))
        tool = needs.program("etcdctl", package="etcd-client")
        return (tool, f"--endpoints={self.address}", *patient)

    def start(self, tls: Tls | None = None) -> None:
        """Start it, again after `kill` with all it knew; returns when it serves. `tls`: its files,
        and whoever comes must have a certificate of their authority."""
        self._tls = tls
        fresh = not self._lives
        for _ in range(5):
            if fresh:
                self.port, self._peer = free_port(), free_port()
            log = self._launch()

            def settled(text: str) -> bool:
                return "ready to serve" in text or not self._runs()

            if "ready to serve" in until_file(log, settled):
                return
        raise AssertionError(f"etcd does not start:\n{log.read_text()[-2000:]}")

    def _launch(self) -> Path:
        self._lives += 1
        log = self._folder / f"log-{self._lives}"
        scheme, files = "http", []
        if self._tls is not None:
            named = {"cert-file": self._tls.cert, "key-file": self._tls.key}
            named["trusted-ca-file"] = self._tls.ca
            scheme, files = "https", [f"--{name}={path}" for name, path in named.items()]
            files.append("--client-cert-auth")
        client, peer = f"{scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer}"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    self._binary,
                    f"--data-dir={self._folder / 'data'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=default={peer}",
                    *files,
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=clean_environment(),
                cwd=self._folder,
                start_new_session=True,
            )
        # Who waits for a line of the log must also hear of an end without one.
        waiting = threading.Thread(target=self._mark_end, args=(self._process, log), daemon=True)
        waiting.start()
        return log

    @staticmethod
    def _mark_end(process: subprocess.Popen[bytes], log: Path) -> None:
        process.wait()
        if log.parent.is_dir():
            with log.open("ab") as out:
                out.write(b"\n(it has ended)\n")

    def _runs(self) -> bool:
        return self._process is not None and is_alive(self._process.pid)

    def kill(self) -> None:
        """kill -9; what it has promised stays."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(LIMIT)

    def wipe(self) -> None:
        """Another, empty one in its place, which counts its revisions from 1."""
        self.kill()
        shutil.rmtree(self._folder / "data")
        self.start(self._tls)

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """It runs again, and finds out how long it has stood."""
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()


class Relay:
    """A way to a server that can be made a black hole: connections stay, bytes stop, new ones are
    accepted by the kernel and never answered. As a host looks whose power has gone."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._flows = threading.Event()
        self._flows.set()
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self) -> None:
        self._flows.clear()

    def close(self) -> None:
        self._flows.set()
        for each in list(self._open):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
                self._flows.wait()
                outer = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._open += [inner, outer]
            for a, b in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._copy, args=(a, b), daemon=True).start()

    def _copy(self, a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(65536):
                self._flows.wait()
                b.sendall(data)
        except OSError:
            pass
