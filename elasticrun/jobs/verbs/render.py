"""`elasticrun render k8s | jobset | trainer-runtime | slurm | operator`: prints what to give to a
scheduler; sends nothing.

The launcher's flags may be mixed with the verb's and are passed on. The output is validated as far
as possible here, including by the launcher's own parsing of the command. Files and plug-ins of the
nodes (token, certificates) are not on this host and are not checked. Notes for the user go to
stderr, one per line.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from elasticrun.cli import settings, trust
from elasticrun.cli.detection.found import Machine
from elasticrun.cli.flags import Parser, get_args_parser
from elasticrun.cli.resolve import resolve, shutdown_timeout
from elasticrun.cli.settings import FlagValues, UsageError
from elasticrun.cli.settings_file.find import for_verb, use
from elasticrun.cli.table import FLAGS
from elasticrun.config import EXIT_OK, EXIT_USAGE
from elasticrun.core.words import did_you_mean
from elasticrun.jobs.manage import arena
from elasticrun.jobs.manage.code import pinned
from elasticrun.jobs.render import checks, grammar, pods, slurm, text, trainer
from elasticrun.jobs.render.checks import Invalid
from elasticrun.jobs.render.settings import GRACE_MARGIN, NEWEST, NodeCommand, PodSettings
from elasticrun.jobs.render.slurm import SIGNALS, BatchSettings
from elasticrun.jobs.verbs import render_flags

TOKEN_SECRET_FLAG: Final = "--token-secret NAME"


def pod_notes(settings: PodSettings) -> Iterator[str]:
    """Notes for the user about a manifest."""
    major, minor = settings.version
    launch = settings.launch
    if checks.has_floating_tag(settings.image):
        yield (
            f"--image {settings.image} has a tag that may move, and a replaced pod then gets "
            "another image: name a version, or a digest (NAME@sha256:...)"
        )
    if settings.grace_seconds < settings.needed_grace:
        yield (
            f"--grace {settings.grace}: a node may need {settings.needed_grace} s to save a step "
            "and leave (--departure-grace, --shutdown-timeout, and 5 s); then it is killed"
        )
    for word in launch.flags:
        flag, _, path = word.partition("=")
        is_local = flag == "--git" and path.startswith("/")
        if (is_local or flag in ("--run-dir", "--log-dir", "--logdir")) and not any(
            Path(path).is_relative_to(volume.mount) for volume in settings.volumes
        ):
            lost = "files there are lost with the pod"
            so = "they have no such repository" if is_local else lost
            yield f"{word}: not on a volume of the pods (--volume, --data): {so}"
    if not settings.token_secret and not has_flag(launch, "--token-file"):
        yield no_token()
    if launch.min_nodes < settings.replicas and settings.version < pods.SUCCESS_POLICY:
        yield (
            "before Kubernetes 1.31 a Job completes only when every index has: pods that are never "
            "scheduled keep it running"
        )
    if settings.gang == "native":
        yield (
            "--gang native works where the cluster has the feature gates GenericWorkload and "
            "GangScheduling on"
        )
    if settings.version > NEWEST:
        yield (
            f"Kubernetes {major}.{minor} is newer than this version of elasticrun: written as for "
            "{}.{}".format(*NEWEST)
        )


def batch_notes(settings: BatchSettings) -> Iterator[str]:
    """Notes for the user about a batch script."""
    needed = settings.launch.departure_time + GRACE_MARGIN
    if not settings.cpus_per_task and not settings.exclusive:
        yield (
            "neither --cpus-per-task nor --exclusive: on most clusters a node's ranks then share "
            "one core"
        )
    if settings.signal and settings.lead < needed:
        yield (
            f"--signal {settings.signal}@{settings.lead}: a node may need {needed:g} s to save a "
            "step and leave (--departure-grace, --shutdown-timeout, and 5 s); then the time is over"
        )
    if not has_flag(settings.launch, "--token-file"):
        yield no_token("--token-file FILE (or ELASTICRUN_TOKEN where sbatch is called)")


def has_flag(launch: NodeCommand, flag: str) -> bool:
    """Whether a flag of the launcher is passed on."""
    return any(word.startswith(f"{flag}=") for word in launch.flags)


def no_token(flag: str = TOKEN_SECRET_FLAG) -> str:
    """The note about a job without a token. `flag`: what would provide one."""
    return f"no {flag}: anyone who can reach the job's master can join it (docs/security.md)"


NODE_FILES: Final = ("token_file", "tls_cert", "tls_key", "tls_ca", "logs_specs")
"""Flags whose values are files or plug-ins of the nodes, so that they cannot be checked here."""


def read_launch(
    ns: argparse.Namespace, program: Sequence[str], *, gpus: int, signal: str
) -> tuple[NodeCommand, list[str]]:
    """The launch settings from flags and program, and notes for the user. `gpus`: GPUs per node, 0
    if unset; `signal`: the signal with which the scheduler ends nodes, "" for none. Raises
    UsageError, Invalid."""
    low, high = settings.nodes(ns.nnodes, ns.given.get("nnodes", ""))
    settings.data(ns.data)
    if ns.git:
        ns.git = pinned(ns.git, trust.withdraw())
    given = render_flags.launcher_words(ns)
    flags = FlagValues(get_args_parser({}).parse_args([*given, "script"]), {})
    ranks, notes = _ranks(ns.nproc_per_node, gpus)
    # the scheduler must also stop retrying a job that cannot succeed
    codes = [] if flags.is_given("exit_codes") else ["--exit-codes=scheduler"]
    launch = NodeCommand(
        script=program[0],
        args=tuple(program[1:]),
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=ranks,
        job_id=settings.name(ns.rdzv_id, "--rdzv-id"),
        by_etcd=bool(flags.text("master_store")),
        flags=(*given, *_signal_flag(flags, signal), *codes),
        departure_time=float(flags.value("departure_grace")) + shutdown_timeout(flags),
    )
    if bool(flags.text("tls_cert")) != bool(flags.text("tls_key")):
        raise Invalid("--tls-cert and --tls-key belong together: give both")
    return launch, [*notes, *_parsed_launch(launch)]


def _ranks(number: str, gpus: int) -> tuple[str, list[str]]:
    """Ranks per node, by default one per GPU, and notes for the user."""
    if not number:
        ranks = max(gpus, 1)
        note = f"{ranks} ranks on each node, one for each GPU, as no --nproc-per-node is given"
        return str(ranks), [note] if ranks > 1 else []
    if gpus and number.isdecimal() and int(number) > gpus:
        return number, [f"{number} ranks on each node (--nproc-per-node) share its {gpus} GPU(s)"]
    return number, []


def _signal_flag(flags: FlagValues, signal: str) -> list[str]:
    """The flag that makes agents save and exit on this signal, if they do not already. Raises
    Invalid if the user's --signals-to-handle lacks it."""
    name = f"SIG{signal}"
    handled = flags.text("signals_to_handle")
    if signal not in SIGNALS or name in settings.signals(handled):
        return []
    if flags.is_given("signals_to_handle"):
        raise Invalid(
            f"--signals-to-handle={handled}: add {name}, or nodes would not save and leave when "
            "the scheduler sends it"
        )
    return [f"--signals-to-handle={handled},{name}"]


def _parsed_launch(launch: NodeCommand) -> list[str]:
    """Parse the command as a node will, which raises UsageError for invalid flags. Returns the
    launcher's notes, except those about missing credentials."""
    files = tuple(f"--{dest.replace('_', '-')}=" for dest in NODE_FILES)
    words = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.nproc_per_node}"]
    words += [f"--rdzv-id={launch.job_id or 'id'}"]
    words += [] if launch.by_etcd else ["--rdzv-backend=c10d", "--rdzv-endpoint=head:29400"]
    words += [word for word in launch.flags if not word.startswith(files)]
    machine = Machine(lambda: 1, lambda word: 1, lambda group: ())
    ns = get_args_parser({}).parse_args([*words, *launch.program])
    # OMP_NUM_THREADS and tokens are set on the nodes; each node reports what it lacks.
    found = resolve(ns, {"OMP_NUM_THREADS": "1"}, machine)
    nodes, ours = found.launch.spec.max_nodes, found.identity
    silent = trust.notes(found.place, nodes, ours.token, ours.tls)
    return [note for note in found.notes if note not in silent]


def main(words: Sequence[str], notify: Callable[[str], None]) -> int:
    """Print the manifest or script for `words`; `notify` prints notes for the user. Raises
    `UsageError` with exit code 2."""
    try:
        return _main(words, notify)
    except (Invalid, UsageError) as wrong:
        raise UsageError(str(wrong), EXIT_USAGE) from None


def _main(words: Sequence[str], notify: Callable[[str], None]) -> int:
    target, *rest = words or ("",)
    if target in ("-h", "--help"):
        sys.stdout.write(render_flags.overview())
        return EXIT_OK
    if target == "operator":
        from elasticrun.jobs.verbs import operator

        return operator.render(rest, notify)
    if target not in render_flags.TARGETS:
        known = ", ".join(render_flags.TARGETS)
        what = f"{target!r} cannot be rendered" if target else "nothing to render"
        raise Invalid(f"{what}: name one of {known} (see elasticrun render --help)")
    flags, program = split_at_dashes(arena.translate(rest, target, notify))
    made = render_flags.parser(target)
    file = for_verb(flags, {}, notify)
    ns, extra = made.parse_known_args(use(file, flags, made, notify))
    refuse_extra(extra, made, target)
    if not program or program[0].startswith("-"):
        raise Invalid(
            f"nothing to run: put the script after --, as in `elasticrun render {target} "
            "... -- train.py --lr 3e-4`"
        )
    if target == "slurm":
        batch, notes = batch_of(ns, program)
        out = slurm.script(batch)
    else:
        settings, notes = pods_of(ns, program)
        out = _manifest(target, settings, ns.output)
    for note in notes:
        notify(note)
    sys.stdout.write(out)
    return EXIT_OK


def pods_of(ns: argparse.Namespace, program: Sequence[str]) -> tuple[PodSettings, list[str]]:
    """The settings for Kubernetes, and notes for the user. Raises UsageError, Invalid."""
    launch, notes = read_launch(ns, program, gpus=max(ns.gpus or 0, 0), signal="TERM")
    settings = _pods(ns, launch)
    return settings, [*notes, *pod_notes(settings)]


def batch_of(ns: argparse.Namespace, program: Sequence[str]) -> tuple[BatchSettings, list[str]]:
    """The settings for Slurm, and notes for the user. Raises UsageError, Invalid."""
    number = re.fullmatch(r"(?:[^:]*:)?(\d+)", ns.gpus_per_node)  # [TYPE:]N
    gpus = int(number[1]) if number else 0
    launch, notes = read_launch(ns, program, gpus=gpus, signal=_signal(ns)[0])
    batch = _batch(ns, launch)
    return batch, [*notes, *batch_notes(batch)]


def _manifest(target: str, settings: PodSettings, form: str) -> str:
    special: dict[tuple[str, str], str] = pods.remarks(settings)
    if target == "jobset":
        documents = pods.jobset_documents(settings)
        special |= pods.JOBSET_REMARKS
    elif target == "trainer-runtime":
        documents = trainer.runtime_documents(settings)
        special |= trainer.REMARKS
    else:
        documents = pods.job_documents(settings)
    return text.as_json(documents) if form == "json" else text.as_yaml(documents, special)


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags, and the words after the first `--`."""
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def refuse_extra(extra: Sequence[str], made: Parser, where: str) -> None:
    """Raise Invalid if `made`, the parser for the backend or target `where`, left words before `--`
    unparsed (`extra`)."""
    if not extra:
        return
    word = extra[0].partition("=")[0]
    if not word.startswith("-"):
        raise Invalid(
            f"{word}: put the script and its arguments after --, as in `... -- {word} --lr 3e-4`"
        )
    if any(word in flag.spellings for flag in FLAGS if flag.dest in render_flags.FIXED_FLAGS):
        raise Invalid(f"{word}: the output already sets this; leave it out")
    known = (*made._option_string_actions, *arena.known_flags(where))
    hint = did_you_mean(word.replace("_", "-"), [name for name in known if "_" not in name])
    raise Invalid(
        f"{word} is no flag of this verb nor of the launcher"
        + (hint or "; put the script and its arguments after --")
    )


def env(ns: argparse.Namespace) -> dict[str, str]:
    """The variables of --env. Raises Invalid for one that sets a launcher flag, because only flags
    are checked."""
    found = grammar.pairs(ns.env, "--env")
    for key in found:
        for flag in FLAGS:
            if flag.variable_in({key: "1"}) != key:
                continue
            if flag.dest in render_flags.FIXED_FLAGS:
                raise Invalid(f"--env {key}: the output already sets {flag.name}; leave it out")
            raise Invalid(f"--env {key}: use {flag.name} instead, which is validated")
    return found


def _matching_fields(
    ns: argparse.Namespace, kind: type[PodSettings | BatchSettings]
) -> dict[str, Any]:
    """The values of those flags that have the name of a field of `kind`."""
    names = {one.name for one in dataclasses.fields(kind)}
    return {name: value for name, value in vars(ns).items() if name in names}


def _claim_volumes(data: str) -> list[str]:
    """The value of --data as volumes: one claim per name."""
    return [f"{name}=pvc:{name}:{path}" for name, path in settings.data(data).items()]


def _pods(ns: argparse.Namespace, launch: NodeCommand) -> PodSettings:
    secret, _, key = ns.token_secret.partition(":")
    if secret and has_flag(launch, "--token-file"):
        raise Invalid("--token-secret and --token-file: the job has one token, so give one of them")
    fields = _matching_fields(ns, PodSettings) | {
        "launch": launch,
        "gpus": _gpus(ns, launch.nproc_per_node),
        "gpu_resource": ns.gpu_resource or "nvidia.com/gpu",
        "volumes": tuple(map(grammar.volume, [*ns.volume, *_claim_volumes(ns.data)])),
        "env": env(ns),
        "token_secret": secret,
        "token_key": key or "token",
        "labels": grammar.pairs(ns.label, "--label"),
        "annotations": grammar.pairs(ns.annotation, "--annotation"),
        "selector": grammar.pairs(ns.selector, "--selector"),
        "tolerations": tuple(map(grammar.toleration, ns.toleration)),
        "pull_secrets": tuple(ns.image_pull_secret),
        "version": checks.version(ns.k8s_version, "--k8s-version"),
    }
    return PodSettings(**fields)


def _gpus(ns: argparse.Namespace, ranks: str) -> int:
    """GPUs per pod: as many as ranks if a resource but no number is given."""
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
    """The signal for every node, and the seconds before the time limit at which it is sent; "" and
    0 for none."""
    text = ns.signal or (render_flags.SIGNAL if ns.time or ns.requeue else "")
    if not text:
        return "", 0
    name, _, lead = text.partition("@")
    if not lead.isascii() or not lead.isdigit():
        raise Invalid(f"--signal {text!r} is not NAME@SECONDS, like {render_flags.SIGNAL}")
    return name.removeprefix("SIG"), int(lead)


def _batch(ns: argparse.Namespace, launch: NodeCommand) -> BatchSettings:
    signal, lead = _signal(ns)
    fields = _matching_fields(ns, BatchSettings) | {
        "launch": launch,
        "time_seconds": grammar.duration(ns.time, "--time") if ns.time else 0,
        "memory": ns.mem,
        "signal": signal,
        "lead": lead,
        "requeues": ns.requeue,
        "options": tuple(option.removeprefix("--") for option in ns.sbatch),
        "env": env(ns),
    }
    return BatchSettings(**fields)
