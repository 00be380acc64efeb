"""`elasticrun operator`, which manages the ElasticJobs of a cluster, and `elasticrun render
operator`, which prints the objects that install it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elasticrun import __version__
from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.settings import UsageError
from elasticrun.config import EXIT_FAILED, EXIT_OK, EXIT_USAGE

if TYPE_CHECKING:
    from elasticrun.jobs.operator.cluster import Cluster


def main(argv: Sequence[str]) -> int:
    """Run the operator until SIGTERM or SIGINT. Raises UsageError if no cluster is configured."""
    made = Parser(
        prog=f"{PROG} operator",
        description="Run the ElasticJobs of a cluster: create their pods, replace failed ones, and "
        "report their state. `elasticrun render operator` installs it in the cluster; started by "
        "hand, it uses the cluster of the kubeconfig.",
    )
    text = "Namespace of the jobs. [default: all]"
    made.add_argument("--namespace", default="", metavar="NAME", help=text)
    text = "With several operators in the cluster: wait until this one leads."
    made.add_argument("--lease", action="store_true", help=text)
    ns = made.parse_args(argv)
    try:
        from lightkube.core.exceptions import ConfigError

        from elasticrun.jobs.operator.cluster import Cluster
    except ImportError as error:
        raise UsageError(f"{error}: pip install 'elasticrun[k8s]'", EXIT_FAILED) from None
    from elasticrun.host import log

    lines = log.set_up(logging.INFO)
    log.set_prefix(f"{PROG} operator")
    try:
        return asyncio.run(_run(lambda: Cluster(ns.namespace), lease=ns.lease))
    except ConfigError as error:
        raise UsageError(f"no cluster: {error}", EXIT_USAGE) from None
    finally:
        lines.flush(1.0)


async def _run(connect: Callable[[], Cluster], *, lease: bool) -> int:
    from elasticrun.jobs.operator.controller import Controller, LeadLost, Trouble, lead

    cluster = connect()
    work = Controller(cluster)
    name = f"{socket.gethostname()}-{os.getpid()}"
    task = asyncio.ensure_future(lead(cluster, name, work) if lease else work.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return EXIT_OK
    except (*Trouble, LeadLost) as error:
        print(f"{PROG} operator: {error}", file=sys.stderr)
    finally:
        with contextlib.suppress(Exception):
            await cluster.close()
    return EXIT_FAILED


def render(argv: Sequence[str], notify: Callable[[str], None]) -> int:
    """Print the objects that install the operator; `notify` prints notes for the user."""
    from elasticrun.jobs.operator.deployment import (
        BARE_IMAGE,
        HOME,
        REMARKS,
        Installation,
        documents,
    )
    from elasticrun.jobs.render import checks, text

    made = Parser(
        prog=f"{PROG} render operator",
        description="The operator of ElasticJobs: its CRD, an account with its rights, a "
        "Deployment. Only prints it.",
    )
    words = f"Run only the jobs of this namespace, in it. [default: all, from {HOME}]"
    made.add_argument("--namespace", default="", metavar="NAME", help=words)
    words = f"Image with elasticrun[k8s]. [default {BARE_IMAGE}, which installs it as it starts]"
    made.add_argument("--image", default="", metavar="IMAGE", help=words)
    words = "Number of operators; one leads. [default 1]"
    made.add_argument("--replicas", type=int, choices=(1, 2), default=1, help=words)
    made.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="Format.")
    ns = made.parse_args(argv)
    if ns.namespace:
        checks.label(ns.namespace, "--namespace")
    if ns.image:
        checks.image(ns.image)
    else:
        notify(
            f"no --image: {BARE_IMAGE} installs elasticrun=={__version__} from PyPI as it starts, "
            "and fails for as long as PyPI does not have it; better name an image with "
            f"elasticrun[k8s]: {PROG} render operator --image registry.example/train:1.0"
        )
    objects = documents(Installation(ns.namespace, ns.image, ns.replicas))
    whole = text.as_json(objects) if ns.output == "json" else text.as_yaml(objects, REMARKS)
    sys.stdout.write(whole)
    return EXIT_OK
