"""The flags of `elasticrun render`: its own, and the launcher flags that are passed on."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any, Final

from elasticrun.cli.flags import PROG, Parser, Store, add_group
from elasticrun.cli.table import FLAGS, GROUPS, Flag
from elasticrun.jobs.render.grammar import VOLUME_FORM
from elasticrun.jobs.render.settings import DEFAULT_VERSION, GANGS, MASTER_PORT

OWN_FLAGS: Final = ("nnodes", "nproc_per_node", "rdzv_id", "name")
"""Launcher flags that the verb defines itself."""

FIXED_FLAGS: Final = (
    "standalone", "auto_config", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port",
    "node_rank", "node_id", "local_addr", "srun", "hosts", "hostfile", "ssh",
    "dry_run", "version", "print_completion",
)  # fmt: skip
"""Flags whose value is fixed in the output, or that have no meaning there."""

PASSED_ON: Final = tuple(flag for flag in FLAGS if flag.dest not in (*OWN_FLAGS, *FIXED_FLAGS))

RETRIES: Final = "How often the whole job is retried after an end that a retry may fix (code 1)."

SIGNAL: Final = "TERM@120"
"""The default of --signal: the signal, and the seconds before the time limit."""

TARGETS: Final = {
    "k8s": "An Indexed Job of Kubernetes and its headless Service",
    "jobset": "The same as a JobSet, if its controller is installed",
    "trainer-runtime": "A runtime of Kubeflow Trainer, whose TrainJobs elasticrun then runs",
    "slurm": "A script for Slurm's sbatch",
    "operator": "Manifests that install the operator for ElasticJobs in a cluster",
}


def parser(target: str) -> Parser:
    """The parser of `elasticrun render TARGET`, for one of TARGETS."""
    made = Parser(
        prog=f"{PROG} render {target}",
        usage=f"{PROG} render {target} --name NAME [options] -- script [arguments ...]",
        description=f"{TARGETS[target]}. Only prints it.",
        epilog="Flags of the launcher (see elasticrun --help-all) are passed to every node.",
        allow_abbrev=False,
    )
    add_job(made)
    if target == "slurm":
        add_slurm(made)
        text = "Output file, with Slurm's patterns."
        made.add_argument("--output", default="", metavar="FILE", help=text)
    else:
        text = "Output format. [default yaml]"
        made.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help=text)
        add_pods(made)
    add_launcher_flags(made)
    return made


def overview() -> str:
    """The list of targets, for a call without one."""
    rows = [f"  {PROG} render {name:<17}{what}" for name, what in TARGETS.items()]
    return "\n".join(("usage, each with its own --help:", *rows, ""))


def launcher_words(ns: argparse.Namespace) -> list[str]:
    """The launcher flags that the user gave, in canonical spelling and in the order of the
    table."""
    given = getattr(ns, "given", {})
    words = []
    for flag in PASSED_ON:
        if flag.dest in given:
            value = getattr(ns, flag.dest)
            words.append(flag.name if flag.kind is None else f"{flag.name}={value}")
    return words


def add_launcher_flags(target: Parser, without: Collection[str] = ()) -> None:
    """Add the launcher flags that are passed on. `without`: the dests of flags to omit."""

    def as_it_is(flag: Flag) -> Flag:
        """The flag, with its validated text as the value."""
        kind = flag.kind
        if kind is None:
            return flag

        def checked(text: str) -> str:
            kind(text)
            return text

        return flag._replace(kind=checked)

    for key, title in GROUPS.items():
        rows = [as_it_is(flag)._replace(env="") for flag in PASSED_ON
                if flag.group == key and flag.dest not in without]  # fmt: skip
        if rows:
            add_group(target, f"the launcher: {title}", rows, {})


def add_job(target: Parser, *, script: bool = False) -> None:
    """Add the flags that every job has. `script`: --name is optional and defaults to the script's
    name."""
    group = target.add_argument_group("the job")
    text = "Name of the job." + " [default: its script's]" * script
    _add(group, "--name", text, required=not script, default="", metavar="NAME")
    text = "Nodes; the job starts with MIN and grows to MAX. [default 1]"
    group.add_argument("--nodes", "--nnodes", dest="nnodes", help=text, default="1", action=Store,
                       metavar="N|MIN:MAX")  # fmt: skip
    text = "Ranks on each node. [default: one per GPU, else 1]"
    _text(group, "--nproc-per-node", "N", text)
    text = "The job's id. [default: from the job's name and number]"
    _text(group, "--rdzv-id", "ID", text)
    _many(group, "--env", "KEY=VALUE", "An environment variable for every node; may be repeated.")
    _text(group, "--working-dir", "DIR", "Working directory.")


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
    """Add the flags for pods in Kubernetes."""
    group = target.add_argument_group("the pods")
    group.add_argument("--image", required=True, metavar="IMAGE", help="Image of every pod.")
    _number(group, "--pods", "Pods at the start; those beyond MAX are spares. [default MAX]")
    _text(group, "--namespace", "NAME", "Namespace. [default: kubectl's]")
    _text(group, "--cpu", "QUANTITY", "CPU of each pod, requested and limited.")
    _text(group, "--memory", "QUANTITY", "Memory of each pod, requested and limited.")
    _number(group, "--gpus", "GPUs of each pod. [default: one per rank with --gpu-resource, else "
            "none]", None)  # fmt: skip
    _text(group, "--gpu-resource", "NAME", "Resource name of a GPU. [default with --gpus: "
          "nvidia.com/gpu]")  # fmt: skip
    _text(group, "--rdma", "NAME", "An RDMA device of each pod, like rdma/hca; its container may "
          "lock memory.")  # fmt: skip
    _switch(
        group,
        "--host-network",
        "Pods use their host's network, at most one per host.",
    )
    _text(group, "--shm", "QUANTITY", "Size of /dev/shm; it counts as the pod's memory.", "8Gi")
    _many(group, "--volume", "NAME=...", f"A volume, may be repeated: {VOLUME_FORM}; in a VALUE, "
          "write a comma as two.")  # fmt: skip
    _text(group, "--token-secret", "NAME[:KEY]", "Secret with the job's token (its key `token`).")
    _text(
        group,
        "--git-secret",
        "NAME",
        "Secret for --git: its keys `password` and, optionally, `username`.",
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
        "Taint to tolerate, or all; may be repeated.",
    )
    _text(group, "--priority", "NAME", "Priority class.")
    _text(group, "--service-account", "NAME", "Service account of the pods.")
    _many(group, "--image-pull-secret", "NAME", "Secret for the image; may be repeated.")
    _many(group, "--label", "KEY=VALUE", "Label of every object and pod; may be repeated.")
    _many(group, "--annotation", "KEY=VALUE", "Annotation of the job and of every pod; may be "
          "repeated.")  # fmt: skip
    group.add_argument(
        "--gang", choices=GANGS, default="none",
        help="Scheduler that places all MIN pods or none. [default none]",
    )  # fmt: skip
    _text(group, "--queue", "NAME", "Queue of kueue or volcano.")
    _text(group, "--scheduler", "NAME", "Name of the gang's scheduler, if it differs.")
    _text(
        group, "--k8s-version", "X.Y", "Version of the cluster.", "{}.{}".format(*DEFAULT_VERSION)
    )


def _lifetime(target: Parser) -> None:
    group = target.add_argument_group("beginning and end")
    _number(group, "--grace", "Seconds from SIGTERM to SIGKILL of a pod. [default: what the "
            "launcher needs, 60 at least]")  # fmt: skip
    _number(group, "--ttl", "Seconds after its end until the job is removed. [default: it stays]",
            None)  # fmt: skip
    _number(group, "--deadline", "Seconds after which the job fails. [default none]")
    _switch(group, "--suspend", "Create no pods until the job is resumed.")
    _number(group, "--retries", RETRIES)
    _number(group, "--backoff-limit", "Number of failed or deleted pods that the job tolerates. "
            "[default: pods times (retries + 1), minus one]", None)  # fmt: skip
    _switch(group, "--rbac", "Allow pods to read and resize their own Job, with a Role for that.")


def add_slurm(target: Parser) -> None:
    """Add the flags for Slurm, except --output."""
    group = target.add_argument_group("the allocation")
    _number(group, "--spares", "Additional nodes that replace lost ones.")
    _text(group, "--partition", "NAME", "Partition.")
    _text(group, "--account", "NAME", "Account.")
    _text(group, "--qos", "NAME", "Quality of service.")
    _text(group, "--time", "TIME", "Time limit: MINUTES, H:MM:SS or D-HH:MM:SS.")
    _text(group, "--gpus-per-node", "[TYPE:]N", "GPUs of each node.")
    _number(group, "--cpus-per-task", "Cores of each node.")
    _text(group, "--mem", "N[KMGT]", "Memory of each node.")
    _switch(group, "--exclusive", "Whole nodes.")
    _text(group, "--array", "INDICES", "A job array; each task is a separate job.")
    _text(group, "--signal", "NAME@SECONDS", "Signal to every node this long before the end. "
          f"[default with --time or --requeue: {SIGNAL}]")  # fmt: skip
    _number(group, "--retries", RETRIES)
    _number(group, "--requeue", "How often the job is requeued after its time limit, or "
            "the loss of a node.")  # fmt: skip
    _many(group, "--sbatch", "NAME[=VALUE]", "A further option of sbatch, like constraint=h100; "
          "may be repeated.")  # fmt: skip
