"""What the user of `elasticrun render` should know of what was printed: a line each, on stderr."""

from __future__ import annotations

from elasticrun.render import checks, job
from elasticrun.render.batch import Batch
from elasticrun.render.wanted import GRACE_MARGIN, NEWEST, Launch, Pods


def of_pods(wanted: Pods) -> list[str]:
    """Of a manifest."""
    major, minor = wanted.version
    notes = []
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
    if has(wanted.launch, "--quarantine") and wanted.replicas <= wanted.launch.max_nodes:
        notes.append(
            "--quarantine: a pod that stays parked keeps its index, and no pod takes its place: "
            f"--pods above {wanted.launch.max_nodes} has spares"
        )
    if not wanted.token_secret and not has(wanted.launch, "--token-file"):
        notes.append(_no_token("--token-secret NAME"))
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


def of_batch(wanted: Batch) -> list[str]:
    """Of a batch script."""
    notes = []
    if not wanted.cpus_per_task and not wanted.exclusive:
        notes.append(
            "neither --cpus-per-task nor --exclusive: on most clusters a node's ranks then share "
            "one core"
        )
    needed = wanted.launch.leaving + GRACE_MARGIN
    if wanted.signal and wanted.lead < needed:
        notes.append(
            f"--signal {wanted.signal}@{wanted.lead}: a node may need {needed:g} s to save a step "
            "and leave (--departure-grace, --shutdown-timeout, and 5 s); then the time is over"
        )
    if not has(wanted.launch, "--token-file"):
        notes.append(_no_token("--token-file FILE (or ELASTICRUN_TOKEN where sbatch is called)"))
    return notes


def has(launch: Launch, flag: str) -> bool:
    """Whether a flag of the launcher is handed on."""
    return any(word.startswith(f"{flag}=") for word in launch.flags)


def _no_token(flag: str) -> str:
    return f"no {flag}: whoever reaches the job's master can join it (docs/security.md)"
