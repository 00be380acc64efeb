"""`elasticrun render k8s | jobset | slurm`: print what a scheduler is to be told; nothing is sent.

The launcher's own flags may stand among those of the verb and are handed on; what is printed is
checked as far as it can be here: by the launcher's own reading of the command, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from elasticrun.cli import render_flags
from elasticrun.cli.asked import Asked
from elasticrun.cli.devices import Machine
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.resolve import resolve, shutdown_timeout
from elasticrun.cli.values import UsageError, name, nodes
from elasticrun.config import EXIT_OK, EXIT_USAGE
from elasticrun.render import checks, grammar, job, jobset, kubernetes, slurm, text
from elasticrun.render.batch import Batch
from elasticrun.render.checks import Invalid
from elasticrun.render.wanted import NEWEST, Launch, Pods

MAKERS: Final[Mapping[str, Callable[[Pods], list[dict[str, Any]]]]] = {
    "k8s": kubernetes.documents,
    "jobset": jobset.documents,
}


def main(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Print the manifest or script that `words` ask for; `say` hears what the user should know.
    Raises `UsageError` with exit code 2."""
    try:
        return _main(words, say)
    except (Invalid, UsageError) as wrong:
        raise UsageError(str(wrong), EXIT_USAGE) from None


def _main(words: Sequence[str], say: Callable[[str], None]) -> int:
    target, *rest = words or ("",)
    if target in ("-h", "--help"):
        sys.stdout.write(render_flags.overview())
        return EXIT_OK
    if target not in render_flags.TARGETS:
        known = ", ".join(render_flags.TARGETS)
        what = f"{target!r} cannot be rendered" if target else "nothing to render"
        raise Invalid(f"{what}: name one of {known} (see elasticrun render --help)")
    flags, program = _split(rest)
    ns = render_flags.parser(target).parse_args(flags)
    if not program or program[0].startswith("-"):
        raise Invalid(
            f"nothing to run: name the script behind --, as in `elasticrun render {target} "
            "... -- train.py --lr 3e-4`"
        )
    launch = _launch(ns, program)
    if target == "slurm":
        batch = _batch(ns, launch)
        out = slurm.script(batch)
        notes = _batch_notes(batch)
    else:
        pods = _pods(ns, launch)
        documents = MAKERS[target](pods)
        out = text.as_json(documents) if ns.output == "json" else text.as_yaml(documents)
        notes = _pod_notes(pods)
    for note in notes:
        say(note)
    sys.stdout.write(out)
    return EXIT_OK


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags, and what stands behind the first `--`."""
    if "--" not in words:
        return list(words), []
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def _launch(ns: argparse.Namespace, program: Sequence[str]) -> Launch:
    low, high = nodes(ns.nnodes)
    given = render_flags.handed_on(ns)
    asked = Asked(get_args_parser({}).parse_args([*given, "script"]), {})
    launch = Launch(
        script=program[0],
        args=tuple(program[1:]),
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=ns.nproc_per_node,
        job_id=name(ns.rdzv_id, "--rdzv-id"),
        by_etcd=bool(asked.text("master_store")),
        flags=tuple(given),
        leaving=float(asked.value("departure_grace")) + shutdown_timeout(asked),
    )
    _understood(launch)
    return launch


def _understood(launch: Launch) -> None:
    """Have the launcher read the command as a node will; raises what it raises there.

    Files of the nodes (token, certificates) are not here, and are left out.
    """
    files = ("--token-file=", "--tls-cert=", "--tls-key=", "--tls-ca=")
    words = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.nproc_per_node}"]
    words += [f"--rdzv-id={launch.job_id or 'id'}"]
    words += [] if launch.by_etcd else ["--rdzv-backend=c10d", "--rdzv-endpoint=head:29400"]
    words += [word for word in launch.flags if not word.startswith(files)]
    machine = Machine(lambda: 1, lambda word: 1, lambda group: ())
    resolve(get_args_parser({}).parse_args([*words, *launch.program]), {}, machine)


def _pods(ns: argparse.Namespace, launch: Launch) -> Pods:
    secret, key = grammar.secret_key(ns.token_secret) if ns.token_secret else ("", "token")
    return Pods(
        name=ns.name,
        image=ns.image,
        launch=launch,
        pods=ns.pods,
        namespace=ns.namespace,
        working_dir=ns.working_dir,
        port=ns.port,
        cpu=ns.cpu,
        memory=ns.memory,
        gpus=_gpus(ns),
        gpu_resource=ns.gpu_resource or "nvidia.com/gpu",
        rdma=ns.rdma,
        shm=ns.shm,
        host_network=ns.host_network,
        gang=ns.gang,
        queue=ns.queue,
        scheduler=ns.scheduler,
        volumes=tuple(map(grammar.volume, ns.volume)),
        env=grammar.pairs(ns.env, "--env"),
        token_secret=secret,
        token_key=key,
        labels=grammar.pairs(ns.label, "--label"),
        annotations=grammar.pairs(ns.annotation, "--annotation"),
        selector=grammar.pairs(ns.selector, "--selector"),
        tolerations=tuple(map(grammar.toleration, ns.toleration)),
        service_account=ns.service_account,
        priority=ns.priority,
        pull_secrets=tuple(ns.image_pull_secret),
        grace=ns.grace,
        ttl=ns.ttl,
        deadline=ns.deadline,
        suspend=ns.suspend,
        backoff_limit=ns.backoff_limit,
        rbac=ns.rbac,
        version=checks.version(ns.k8s_version, "--k8s-version"),
    )


def _gpus(ns: argparse.Namespace) -> int:
    """GPUs of a pod: as many as ranks, where a resource is named and no number is."""
    if ns.gpus is not None:
        return int(ns.gpus)
    ranks = str(ns.nproc_per_node)
    if ns.gpu_resource and not ranks.isdigit():
        raise Invalid(
            f"--nproc-per-node={ranks} does not say how many GPUs a pod has: give --gpus N"
        )
    if ranks in ("gpu", "xpu"):
        raise Invalid(f"--nproc-per-node={ranks}: a pod has no GPU unless --gpus N asks for it")
    return int(ranks) if ns.gpu_resource else 0


def _batch(ns: argparse.Namespace, launch: Launch) -> Batch:
    signal, _, lead = ns.signal.partition("@")
    if not lead.isascii() or not lead.isdigit():
        raise Invalid(f"--signal {ns.signal!r} is not NAME@SECONDS, like TERM@120")
    return Batch(
        name=ns.name,
        launch=launch,
        spares=ns.spares,
        partition=ns.partition,
        account=ns.account,
        qos=ns.qos,
        time=ns.time,
        time_seconds=grammar.duration(ns.time, "--time") if ns.time else 0,
        gpus_per_node=ns.gpus_per_node,
        cpus_per_task=ns.cpus_per_task,
        memory=ns.mem,
        exclusive=ns.exclusive,
        array=ns.array,
        output=ns.output,
        working_dir=ns.working_dir,
        signal=signal.removeprefix("SIG"),
        lead=int(lead),
        requeues=ns.requeue,
        env=grammar.pairs(ns.env, "--env"),
    )


def _pod_notes(wanted: Pods) -> list[str]:
    """What the user should know of what was printed, a line each."""
    major, minor = wanted.version
    notes = [f"/dev/shm of each pod has {wanted.shm} (--shm), which count as its memory"]
    if checks.floats(wanted.image):
        notes.append(
            f"--image {wanted.image} may be another image tomorrow, also for a pod that is "
            "replaced: name a version, or a digest (NAME@sha256:...)"
        )
    if wanted.grace_seconds < wanted.needed_grace:
        notes.append(
            f"--grace {wanted.grace}: a node may need {wanted.needed_grace} s to save a step and "
            "leave (--departure-grace, --shutdown-timeout, and 5 s); then it is killed"
        )
    if _has(wanted.launch, "--quarantine") and wanted.replicas <= wanted.launch.max_nodes:
        notes.append(
            "--quarantine: a pod that stays parked keeps its index, and no pod takes its place: "
            f"--pods above {wanted.launch.max_nodes} has spares"
        )
    if not wanted.token_secret and not _has(wanted.launch, "--token-file"):
        notes.append(
            "without --token-secret NAME anyone in the cluster's network who reaches the job's "
            "master can join it and run code in its pods (docs/security.md)"
        )
    if wanted.launch.min_nodes < wanted.replicas and wanted.version < job.SUCCESS_POLICY:
        notes.append(
            "before Kubernetes 1.31 a Job is done only when every index is: pods that never got a "
            "place keep it from ending"
        )
    if wanted.gang == "native":
        notes.append(
            "--gang native works where the cluster has the feature gates GenericWorkload and "
            "GangScheduling on"
        )
    if wanted.version > NEWEST:
        notes.append(
            f"Kubernetes {major}.{minor} is newer than this version of elasticrun: written as for "
            "{}.{}".format(*NEWEST)
        )
    return notes


def _batch_notes(wanted: Batch) -> list[str]:
    notes = []
    if not wanted.cpus_per_task and not wanted.exclusive:
        notes.append(
            "neither --cpus-per-task nor --exclusive: on most clusters a node's ranks then share "
            "one core"
        )
    if wanted.requeues:
        notes.append(
            "a job whose first machine loses power runs on without its script (--no-kill), and "
            "nothing requeues it: `scontrol requeue JOBID` does"
        )
    if not _has(wanted.launch, "--token-file"):
        notes.append(
            "without --token-file FILE (or ELASTICRUN_TOKEN in the environment of sbatch) anyone "
            "who reaches the job's master can join it (docs/security.md)"
        )
    return notes


def _has(launch: Launch, flag: str) -> bool:
    return any(word.startswith(f"{flag}=") for word in launch.flags)
