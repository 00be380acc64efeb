"""`elasticrun render k8s | jobset | slurm`: print what a scheduler is to be told; nothing is sent.

The launcher's own flags may stand among those of the verb and are handed on; what is printed is
checked as far as it can be here: by the launcher's own reading of the command, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from elasticrun.cli import render_flags, render_notes
from elasticrun.cli.render_launch import gpus_in, read
from elasticrun.cli.table import FLAGS
from elasticrun.cli.values import UsageError
from elasticrun.config import EXIT_OK, EXIT_USAGE
from elasticrun.render import checks, grammar, job, jobset, kubernetes, slurm, text
from elasticrun.render.batch import Batch
from elasticrun.render.checks import Invalid
from elasticrun.render.wanted import Launch, Pods

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
    ns, extra = render_flags.parser(target).parse_known_args(flags)
    _refuse(extra)
    if not program or program[0].startswith("-"):
        raise Invalid(
            f"nothing to run: name the script behind --, as in `elasticrun render {target} "
            "... -- train.py --lr 3e-4`"
        )
    if target == "slurm":
        gpus = gpus_in(ns.gpus_per_node)
        launch, notes = read(ns, program, gpus=gpus, signal=_signal(ns)[0])
        batch = _batch(ns, launch)
        out = slurm.script(batch)
        notes += render_notes.of_batch(batch)
    else:
        launch, notes = read(ns, program, gpus=max(ns.gpus or 0, 0), signal="TERM")
        pods = _pods(ns, launch)
        out = _manifest(target, pods, ns.output)
        notes += render_notes.of_pods(pods)
    for note in notes:
        say(note)
    sys.stdout.write(out)
    return EXIT_OK


def _manifest(target: str, pods: Pods, form: str) -> str:
    documents = MAKERS[target](pods)
    if form == "json":
        return text.as_json(documents)
    special = jobset.REMARKS if target == "jobset" else {}
    return text.as_yaml(documents, {**special, **job.remarks(pods)})


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags, and what stands behind the first `--`."""
    if "--" not in words:
        return list(words), []
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def _refuse(extra: Sequence[str]) -> None:
    """Words before -- that nobody knows; raises, unless there are none."""
    if not extra:
        return
    word = extra[0].partition("=")[0]
    if not word.startswith("-"):
        raise Invalid(
            f"{word}: the script and its arguments stand behind --, as in `... -- {word} --lr 3e-4`"
        )
    if any(word in flag.spellings for flag in FLAGS if flag.dest in render_flags.SETTLED):
        raise Invalid(f"{word}: what is printed settles that; leave it out")
    raise Invalid(
        f"{word} is no flag of this verb nor of the launcher; what is meant for the script stands "
        "behind --"
    )


def _env(ns: argparse.Namespace) -> dict[str, str]:
    """--env; variables by which flags of the launcher are given are better said as flags."""
    found = grammar.pairs(ns.env, "--env")
    for key in found:
        for flag in FLAGS:
            if flag.variable_in({key: "1"}) != key:
                continue
            if flag.dest in render_flags.SETTLED:
                raise Invalid(f"--env {key}: what is printed settles {flag.name}; leave it out")
            raise Invalid(f"--env {key}: say it by {flag.name}, which is checked")
    return found


def _pods(ns: argparse.Namespace, launch: Launch) -> Pods:
    secret, key = grammar.secret_key(ns.token_secret) if ns.token_secret else ("", "token")
    if secret and render_notes.has(launch, "--token-file"):
        raise Invalid("--token-secret and --token-file: the job has one token, so give one of them")
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
        gpus=_gpus(ns, launch.nproc_per_node),
        gpu_resource=ns.gpu_resource or "nvidia.com/gpu",
        rdma=ns.rdma,
        shm=ns.shm,
        host_network=ns.host_network,
        gang=ns.gang,
        queue=ns.queue,
        scheduler=ns.scheduler,
        volumes=tuple(map(grammar.volume, ns.volume)),
        env=_env(ns),
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
        retries=ns.retries,
        backoff_limit=ns.backoff_limit,
        rbac=ns.rbac,
        version=checks.version(ns.k8s_version, "--k8s-version"),
    )


def _gpus(ns: argparse.Namespace, ranks: str) -> int:
    """GPUs of a pod: as many as ranks, where a resource is named and no number is."""
    if ns.gpus is not None:
        return int(ns.gpus)
    if ns.gpu_resource and not ranks.isdigit():
        raise Invalid(
            f"--nproc-per-node={ranks} does not say how many GPUs a pod has: give --gpus N"
        )
    if ranks in ("gpu", "xpu"):
        raise Invalid(f"--nproc-per-node={ranks}: a pod has no GPU unless --gpus N asks for it")
    return int(ranks) if ns.gpu_resource else 0


def _signal(ns: argparse.Namespace) -> tuple[str, int]:
    """What every node gets so many seconds before the end; "" and 0 for nothing."""
    text = ns.signal or (render_flags.SIGNAL if ns.time or ns.requeue else "")
    if not text:
        return "", 0
    name, _, lead = text.partition("@")
    if not lead.isascii() or not lead.isdigit():
        raise Invalid(f"--signal {text!r} is not NAME@SECONDS, like {render_flags.SIGNAL}")
    return name.removeprefix("SIG"), int(lead)


def _batch(ns: argparse.Namespace, launch: Launch) -> Batch:
    signal, lead = _signal(ns)
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
        signal=signal,
        lead=lead,
        requeues=ns.requeue,
        retries=ns.retries,
        options=tuple(option.removeprefix("--") for option in ns.sbatch),
        env=_env(ns),
    )
