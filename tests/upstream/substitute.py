"""A pytest plug-in for tests of torch's launcher: what they import as torch's is ours.

    python -m pytest -p tests.upstream.substitute FOLDER/test/distributed/launcher/test_run.py

`torch.distributed.run` is elasticrun.run, `torch.distributed.launcher.api` is elasticrun.launcher.
A fresh interpreter that one of their files spawns has torch's modules again.

Their etcd server speaks a protocol of 2016, by a package of that time; here it is a real etcd of
today, which our masters keep their record in.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import types
from pathlib import Path

import torch.distributed
import torch.distributed.elastic.multiprocessing.errors
import torch.distributed.launcher

import elasticrun.launcher
import elasticrun.run
from tests import needs
from tests.etcd import server


class EtcdServer:
    """torch's class, as far as its tests use it."""

    def start(self) -> None:
        binary = needs.program("etcd", package="etcd-server")
        self._folder = tempfile.mkdtemp(prefix="elasticrun-etcd-")
        self._server = server.EtcdServer(binary, Path(self._folder))
        self._server.start()

    def get_endpoint(self) -> str:
        return self._server.address

    def stop(self) -> None:
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def put_in_place() -> None:
    """In sys.modules and as attributes: they are looked up both ways."""
    sys.modules["torch.distributed.run"] = elasticrun.run
    torch.distributed.run = elasticrun.run
    sys.modules["torch.distributed.launcher.api"] = elasticrun.launcher
    torch.distributed.launcher.api = elasticrun.launcher
    for name in ("LaunchConfig", "elastic_launch", "launch_agent"):
        setattr(torch.distributed.launcher, name, getattr(elasticrun.launcher, name))
    elasticrun.launcher._get_entrypoint_name = elasticrun.launcher.entrypoint_name
    etcd = types.ModuleType("torch.distributed.elastic.rendezvous.etcd_server")
    etcd.EtcdServer = EtcdServer
    sys.modules[etcd.__name__] = etcd


put_in_place()
