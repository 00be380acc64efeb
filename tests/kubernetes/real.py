"""A cluster of which a kubeconfig is all that is known: the one that ELASTICRUN_TEST_KUBECONFIG
names. A test has a namespace of its own there, which goes with it; ElasticJob's CRD stays."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.harness import LIMIT
from tests.kubernetes.cluster import Client, StandIn
from tests.kubernetes.server.kinds import Obj

KUBECONFIG: Final = os.environ.get("ELASTICRUN_TEST_KUBECONFIG", "")
IMAGE: Final = os.environ.get("ELASTICRUN_TEST_IMAGE", "")

WHY: Final = (
    "for the stand-in alone (it breaks pods, nodes or lines, or sees to all namespaces): run it "
    "without ELASTICRUN_TEST_KUBECONFIG"
)
standin_only = pytest.mark.skipif(bool(KUBECONFIG), reason=WHY)


class RealCluster:
    """As much of it as of a StandIn: what users see and do."""

    def __init__(self, kubeconfig: Path, scratch: Path) -> None:
        self.namespace = f"er-{uuid.uuid4().hex[:8]}"
        self.scratch = scratch
        self._kubeconfig = kubeconfig
        self.client()("create", "namespace", self.namespace)

    def client(self, user: str = "admin", namespace: str = "") -> Client:
        """`admin`: whose kubeconfig it is; else a service account, NAMESPACE:NAME."""
        namespace = namespace or self.namespace
        admin = Client(self._kubeconfig, self.scratch, namespace)
        if user == "admin":
            return admin
        space, _, name = user.partition(":")
        config = json.loads(admin("config", "view", "--raw", "--minify", "--flatten", "-o=json"))
        config["users"][0]["user"] = {"token": admin("create", "token", name, "-n", space)}
        config["contexts"][0]["context"]["namespace"] = namespace
        path = self.scratch / f"kubeconfig-{space}-{name}"
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return Client(path, self.scratch, namespace)

    def objects(self, plural: str, group: str = "") -> list[Obj]:
        found = self.client()("get", f"{plural}.{group}".rstrip("."), "-o", "json")
        items: list[Obj] = json.loads(found)["items"]
        return items

    def until(
        self,
        plural: str,
        holds: Callable[[list[Obj]], Any],
        *,
        group: str = "",
        limit: float = LIMIT,
    ) -> list[Obj]:
        """Wait until this is true of the objects of a kind; TimeoutError shows them."""
        client, ends = self.client(), time.monotonic() + limit
        words = client.command("get", f"{plural}.{group}".rstrip("."), "--watch", "-o", "name")
        with subprocess.Popen(
            words, env=client.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as watch:
            assert watch.stdout is not None
            try:
                while not holds(found := self.objects(plural, group)):
                    if time.monotonic() > ends:
                        raise TimeoutError(f"{plural}: {json.dumps(found)}")
                    # it may have begun after the change: then nothing comes
                    if select.select([watch.stdout], [], [], 1.0)[0]:
                        os.read(watch.stdout.fileno(), 1 << 16)
            finally:
                watch.kill()
        return found

    def used(self, _user: str) -> set[tuple[str, str, str]]:
        """Unknown: what somebody had no right to, the cluster has refused."""
        return set()

    def close(self) -> None:
        self.client()("delete", "namespace", self.namespace, "--wait=false")


AnyCluster = StandIn | RealCluster
