"""The flags of `elasticrun render`: its own, and the launcher flags that are passed on."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any, Final

from elasticrun.cli.flags import PROG, Parser, Store, add_group
from elasticrun.cli.table import FLAGS, GROUPS, Flag
from elasticrun.jobs.render.grammar import VOLUME_FORM
from elasticrun.jobs.render.settings import ASSUMED, GANGS, MASTER_PORT

SAID_HERE: Final = ("nnodes", "nproc_per_node", "rdzv_id", "name")
"""Launcher flags that the verb defines itself."""

SETTLED: Final = (
    "standalone", "auto_config", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port",
    "node_rank", "node_id", "local_addr", "srun", "hosts", "hostfile", "ssh",
    "dry_run", "version", "print_completion",
)  # fmt: skip
"""Flags whose value is fixed in the output, or that have no meaning there."""

HANDED_ON: Final = tuple(flag for flag in FLAGS if flag.dest not in (*SAID_HERE, *SETTLED))

RETRIES: Final = (
    "How often the whole job is tried again after an end that another try may better (code 1)."
)

SIGNAL: Final = "TERM@120"
"""Default signal for nodes before their time is over."""

TARGETS: Final = {
    "k8s": "An Indexed Job of Kubernetes and its headless Service",
    "jobset": "The same as a JobSet, where its controller is installed",
    "slurm": "A script for Slurm's sbatch",
    "operator": "What installs the operator of ElasticJobs in a cluster",
}


def parser(target: str) -> Parser:
    """The parser of `elasticrun render TARGET`, for one of TARGETS."""
    made = Parser(
        prog=f"{PROG} render {target}",
        usage=f"{PROG} render {target} --name NAME [options] -- script [arguments ...]",
        description=f"{TARGETS[target]}. It is printed, and sent nowhere.",
        epilog="Flags of the launcher (see elasticrun --help-all) are handed on to every node.",
        allow_abbrev=False,
    )
    add_job(made)
    if target == "slurm":
        add_slurm(made)
        text = "File of what is printed, in Slurm's form."
        made.add_argument("--output", default="", metavar="FILE", help=text)
    else:
        text = "Form. [default yaml]"
        made.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help=text)
        add_pods(made)
    add_launcher_flags(made)
    return made


def overview() -> str:
    """The list of targets, for a call without one."""
    rows = [f"  {PROG} render {name:<10}{what}" for name, what in TARGETS.items()]
    return "\n".join(("usage, each with its own --help:", *rows, ""))


def launcher_words(ns: argparse.Namespace) -> list[str]:
    """The launcher flags that were given, in one spelling, in the order of the table."""
    given = getattr(ns, "given", {})
    words = []
    for flag in HANDED_ON:
        if flag.dest in given:
            value = getattr(ns, flag.dest)
            words.append(flag.name if flag.kind is None else f"{flag.name}={value}")
    return words


def add_launcher_flags(target: Parser, without: Collection[str] = ()) -> None:
    """Add the launcher's flags, except those with these names."""

    def as_it_is(flag: Flag) -> Flag:
        """The flag with its text as the value, after validation."""
        kind = flag.kind
        if kind is None:
            return flag

        def checked(text: str) -> str:
            kind(text)
            return text

        return flag._replace(kind=checked)

    for key, title in GROUPS.items():
        rows = [as_it_is(flag)._replace(env="") for flag in HANDED_ON
                if flag.group == key and flag.dest not in without]  # fmt: skip
        if rows:
            add_group(target, f"the launcher: {title}", rows, {})


def add_job(target: Parser, *, script: bool = False) -> None:
    """Add the flags of every job. `script`: the name defaults to the script's."""
    group = target.add_argument_group("the job")
    text = "Name of the job." + " [default: its script's]" * script
    _add(group, "--name", text, required=not script, default="", metavar="NAME")
    text = "Nodes; the job begins with MIN and takes MAX. [default 1]"
    group.add_argument("--nodes", "--nnodes", dest="nnodes", help=text, default="1", action=Store,
                       metavar="N|MIN:MAX")  # fmt: skip
    text = "Ranks on each node. [default: one for each GPU, else 1]"
    _text(group, "--nproc-per-node", "N", text)
    text = "Name under which the nodes meet. [default: of the job's name and number]"
    _text(group, "--rdzv-id", "ID", text)
    _many(group, "--env", "KEY=VALUE", "A variable of every node, as it is; may be repeated.")
    _text(group, "--working-dir", "DIR", "Where it runs.")


def _add(group: Any, flag: str, text: str, **options: Any) -> None:
    spellings = dict.fromkeys((flag, "--" + flag.lstrip("-").replace("-", "_")))
    group.add_argument(*spellings, help=text, **options)


def _many(group: Any, flag: str, metavar: str, text: str) -> None:
    group.add_argument(flag, action="append", default=[], metavar=metavar, help=text)


def _switch(group: Any, flag: str, text: str) -> None:
    _add(group, flag, text, action="store_true")


def _text(group: Any, flag: str, metavar: str, text: str, default: str = "") -> None:
    remark = f" [default {default}]" if default else ""
    _add(group, flag, text + remark, default=default, metavar=metavar)


def _number(group: Any, flag: str, text: str, default: int | None = 0) -> None:
    _add(group, flag, text, type=_whole, default=default, metavar="N")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def add_pods(target: Parser) -> None:
    """Add the flags for Kubernetes, except the cluster."""
    group = target.add_argument_group("the pods")
    group.add_argument("--image", required=True, metavar="IMAGE", help="Image of every pod.")
    _number(group, "--pods", "Pods to begin with; more than MAX are spares. [default MAX]")
    _text(group, "--namespace", "NAME", "Namespace; where none is given, kubectl's.")
    _text(group, "--cpu", "QUANTITY", "CPU of each pod, requested and limited.")
    _text(group, "--memory", "QUANTITY", "Memory of each pod, requested and limited.")
    _number(group, "--gpus", "GPUs of each pod. [default: as many as ranks, where --gpu-resource "
            "is given, else none]", None)  # fmt: skip
    _text(group, "--gpu-resource", "NAME", "What a GPU is called: nvidia.com/gpu where only --gpus "
          "is given.")  # fmt: skip
    _text(group, "--rdma", "NAME", "An RDMA device of each pod, like rdma/hca; its container may "
          "lock memory.")  # fmt: skip
    _switch(group, "--host-network", "Pods use their host's network; one pod of the job a host.")
    _text(group, "--shm", "QUANTITY", "Size of /dev/shm; it counts as the pod's memory.", "8Gi")
    _many(group, "--volume", "NAME=...", f"A volume, may be repeated: {VOLUME_FORM}; two commas "
          "stand for one in a VALUE.")  # fmt: skip
    _text(group, "--token-secret", "NAME[:KEY]", "Secret with the job's token (its key `token`).")
    _text(
        group,
        "--git-secret",
        "NAME",
        "Secret for --git: its keys `password` and, if any, `username`.",
    )
    _number(group, "--port", f"Port of the job's master. [default {MASTER_PORT}]", MASTER_PORT)
    _where(target)
    _lifetime(target)


def _where(target: Parser) -> None:
    group = target.add_argument_group("where pods run")
    _many(group, "--selector", "KEY=VALUE", "Label that a node must have; may be repeated.")
    _many(
        group,
        "--toleration",
        "KEY[=VALUE][:EFFECT]",
        "Taint to put up with, or all; may be repeated.",
    )
    _text(group, "--priority", "NAME", "Priority class.")
    _text(group, "--service-account", "NAME", "Service account of the pods.")
    _many(group, "--image-pull-secret", "NAME", "Secret for the image; may be repeated.")
    _many(group, "--label", "KEY=VALUE", "Label of every object and pod; may be repeated.")
    _many(group, "--annotation", "KEY=VALUE", "Annotation of the job and of every pod; may be "
          "repeated.")  # fmt: skip
    group.add_argument(
        "--gang", choices=GANGS, default="none",
        help="Who places MIN pods together or none at all. [default none]",
    )  # fmt: skip
    _text(group, "--queue", "NAME", "Queue of kueue or volcano.")
    _text(group, "--scheduler", "NAME", "Scheduler, where the gang's is called otherwise.")
    _text(group, "--k8s-version", "X.Y", "Version of the cluster.", "{}.{}".format(*ASSUMED))


def _lifetime(target: Parser) -> None:
    group = target.add_argument_group("beginning and end")
    _number(group, "--grace", "Seconds from SIGTERM to SIGKILL of a pod. [default: what the "
            "launcher needs, 60 at least]")  # fmt: skip
    _number(group, "--ttl", "Seconds after its end until the job is removed. [default: it stays]",
            None)  # fmt: skip
    _number(group, "--deadline", "Seconds after which the job is ended. [default none]")
    _switch(group, "--suspend", "Make no pods until it is resumed.")
    _number(group, "--retries", RETRIES)
    _number(group, "--backoff-limit", "Failed pods, also deleted ones, that do not yet end the "
            "job. [default: pods times (retries + 1), less one]", None)  # fmt: skip
    _switch(group, "--rbac", "Pods may read and resize their own Job, by a Role for it alone.")


def add_slurm(target: Parser) -> None:
    """Add the flags for Slurm, except the output file."""
    group = target.add_argument_group("the allocation")
    _number(group, "--spares", "Nodes on top of MAX, which take the place of lost ones.")
    _text(group, "--partition", "NAME", "Partition.")
    _text(group, "--account", "NAME", "Account.")
    _text(group, "--qos", "NAME", "Quality of service.")
    _text(group, "--time", "TIME", "Time limit: MINUTES, H:MM:SS or D-HH:MM:SS.")
    _text(group, "--gpus-per-node", "[TYPE:]N", "GPUs of each node.")
    _number(group, "--cpus-per-task", "Cores of each node.")
    _text(group, "--mem", "N[KMGT]", "Memory of each node.")
    _switch(group, "--exclusive", "Whole nodes.")
    _text(group, "--array", "INDICES", "An array; each of its tasks is a job of its own.")
    _text(group, "--signal", "NAME@SECONDS", "What every node gets so long before the end. "
          f"[default, with --time or --requeue: {SIGNAL}]")  # fmt: skip
    _number(group, "--retries", RETRIES)
    _number(group, "--requeue", "How often the job goes back into the queue: when its time is over "
            "or a node has died.")  # fmt: skip
    _many(group, "--sbatch", "NAME[=VALUE]", "A further option of sbatch, like constraint=h100; "
          "may be repeated.")  # fmt: skip
