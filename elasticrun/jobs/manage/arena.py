"""Accepts Arena's syntax in `submit` and `render`: its flags where the meaning is the same, and its
command in one string.

Pure: it translates Arena's words to this program's. `ROWS` has each flag's translation for pods,
Slurm and this host. A flag without words for a target is refused there, or ignored with a note.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from elasticrun.cli import settings
from elasticrun.cli.flags import PROG, get_args_parser
from elasticrun.cli.rendezvous import RENDEZVOUS_FLAGS, without_flags
from elasticrun.jobs.convert.command import LAUNCHER, SHELLS
from elasticrun.jobs.render.checks import Invalid

PODS, SLURM, LOCAL = "pods", "slurm", "local"
EVERYWHERE: Final = (PODS, SLURM, LOCAL)

KINDS: Final = ("pytorch", "pytorchjob", "py")
"""Arena's names for this kind of job; accepted before, between and after the flags."""

OTHER_KINDS: Final = (
    *("tf", "tfjob", "mpi", "mpijob", "horovod", "horovodjob", "et", "etjob", "ray", "rayjob"),
    *("spark", "sparkjob", "volcano", "volcanojob", "deepspeed", "deepspeedjob"),
)
"""Arena's kinds of jobs that this program does not run."""

LAUNCHERS: Final = ("torchrun", "dlrover-run", PROG)
"""Programs that accept the launcher's flags."""


class Row(NamedTuple):
    """The translation of one flag. `words`: this program's words, by target. They may contain
    {value} (unchanged), {seconds}, {minutes}, {taint}, {key} and {count} (of KEY=N), {mem} (Slurm's
    G for Gi), {number} (counts such flags), {host} and {mount} (of /HOST[:/MOUNT]). `note`: why the
    flag is ignored for a target without words; "": it is refused. `alone`: the value that the flag
    has if none follows."""

    words: Mapping[str, tuple[str, ...]] = {}
    note: str = ""
    alone: str = ""


def _only_pods(*words: str, **more: str) -> Row:
    """A flag that only pods support."""
    return Row({PODS: words}, **more)


def _everywhere(*words: str) -> Row:
    return Row(dict.fromkeys(EVERYWHERE, words))


_IGNORED: Final = ("--image-pull-policy", "--tensorboard-image", "--loglevel", "--arena-namespace",
                   "--config", "--sync-image", "--shell")  # fmt: skip

ROWS: Final[Mapping[str, Row]] = {
    "--workers": _everywhere("--nodes={value}"),
    "--gpus": Row({PODS: ("--gpus={value}",), SLURM: ("--gpus-per-node={value}",),
                   LOCAL: ("--nproc-per-node={value}",)}),
    "--cpu": Row({PODS: ("--cpu={value}",), SLURM: ("--cpus-per-task={value}",)}),
    "--memory": Row({PODS: ("--memory={value}",), SLURM: ("--mem={mem}",)}),
    "--device": _only_pods("--gpu-resource={key}", "--gpus={count}"),
    "--rdma": _only_pods("--rdma={value}", alone="rdma/hca"),
    "--share-memory": Row({PODS: ("--shm={value}",)}, "the ranks use the host's /dev/shm here"),
    "--working-dir": _everywhere("--working-dir={value}"),
    "--data": _everywhere("--data={value}"),
    "--data-dir": Row({PODS: ("--volume=dir{number}=host:{host}:{mount}",),
                       SLURM: ("--data=dir{number}:{host}",),
                       LOCAL: ("--data=dir{number}:{host}",)}),
    "--host-network": _only_pods("--host-network", alone="true"),
    "--tensorboard": Row(dict.fromkeys(EVERYWHERE, ("--tensorboard",)), alone="true"),
    "--gang": _only_pods("--gang={value}", alone="coscheduling"),
    "--toleration": _only_pods("--toleration={taint}"),
    "--running-timeout": Row({PODS: ("--deadline={seconds}",), SLURM: ("--time={minutes}",)}),
    "--ttl-after-finished": Row({PODS: ("--ttl={seconds}",)},
                                "`elasticrun prune --since` removes ended jobs"),
    "--clean-task-policy": Row({}, "nodes end with their job, and pods that have ended stay until "
                                   "--ttl-after-finished"),
    "--job-backoff-limit": _only_pods("--backoff-limit={value}"),
    "--retry": Row({PODS: ("--retries={value}",), SLURM: ("--retries={value}",)}),
    **{name: _only_pods(name + "={value}") for name in (
        "--image", "--namespace", "--priority", "--selector", "--label", "--annotation",
        "--image-pull-secret", "--scheduler", "--service-account")},
    **{name: Row({}, "not needed here") for name in _IGNORED},
}  # fmt: skip

SHORT_FLAGS: Final = {"-e": "--env", "-l": "--label", "-a": "--annotation", "-n": "--namespace",
                "-d": "--data", "-p": "--priority"}  # fmt: skip

SPECIAL_FLAGS: Final = ("--env", "--git", "--sync-source", "--sync-mode", "--config-file")
"""Flags whose translation needs code."""

CODE_PARENT: Final = "/root"
"""Arena's default --working-dir; it puts code below this folder."""

_TIME: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?\Z")
_SHELL: Final = re.compile(r"[;&|<>`$]|\n")
_PYTHON: Final = r"python[\d.]*"
_PROGRAM_NAMES: Final = re.compile(rf"{_PYTHON}|{'|'.join(LAUNCHERS)}")
_MODULES: Final = re.compile(r"(-u )?-m torch\.distributed\.(run|launch)(?= |\Z)")
_GIT_REF: Final = re.compile(r"(GIT_SYNC_(?:BRANCH|REV))=(.*)\Z")


def translate(words: Sequence[str], where: str, notify: Callable[[str], None]) -> list[str]:
    """Translate what was typed after `submit` or `render TARGET`; other words stay unchanged.
    `where`: a backend of --on or a target of `render`. `notify` receives a note for each flag
    without effect. Raises Invalid."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    flags, behind = words[:at], words[at:]
    for before, word in itertools.pairwise(["", *flags]):
        if word in (*KINDS, *OTHER_KINDS) and (
            before[:1] != "-" or "=" in before
        ):  # not a flag's value
            if word in OTHER_KINDS:
                raise Invalid(f"{word}: {PROG} runs only Arena jobs of the kind {KINDS[0]}")
            flags.remove(word)
            break
    if not behind and flags and " " in flags[-1].strip() and not flags[-1].startswith("-"):
        more, behind = _command(flags.pop())
        flags += more
    elif _PROGRAM_NAMES.fullmatch("".join(behind[1:2])) and "--no-python" not in flags:
        more, behind = _program(behind[1:])
        flags += more
    return [*_Translation(flags, _place(where), notify).translate(), *behind]


def known_flags(where: str) -> list[str]:
    """Arena's flags that are translated for this target, or ignored with a note."""
    place = _place(where)
    return [*SPECIAL_FLAGS, *(name for name, row in ROWS.items() if place in row.words or row.note)]


def _place(where: str) -> str:
    return {"slurm": SLURM, "local": LOCAL, "ssh": LOCAL}.get(where, PODS)


class _Translation:
    """Translates the flags of one command line."""

    def __init__(self, flags: list[str], place: str, notify: Callable[[str], None]) -> None:
        self._flags = flags
        self._place = place
        self._notify = notify
        self._has_rank_count = any(re.match(r"--nproc[-_]per[-_]node\b", word) for word in flags)
        self._git = ""
        self._refs: dict[str, str] = {}
        self._seen: set[str] = set()
        self._numbers = itertools.count()

    def translate(self) -> list[str]:
        done: list[str] = []
        while self._flags:
            word = self._flags.pop(0)
            name, equals, value = word.partition("=")
            name = SHORT_FLAGS.get(name, _canonical_name(name) if name.startswith("--") else name)
            if name not in ROWS and name not in SPECIAL_FLAGS:
                done.append(word)
                continue
            self._seen.add(name)
            row = ROWS.get(name, Row())
            if row.alone:
                value = self._optional_value(value, equals, row)
            elif not equals:
                value = self._next_word(name)
            done += self._translate(name, value, row)
        return done + self._combined_words()

    def _combined_words(self) -> list[str]:
        """Words that depend on several flags together."""
        if not self._git:
            if "--sync-mode" in self._seen:
                raise Invalid("--sync-mode=git needs --sync-source=URL")
            return [f"--env={name}={ref}" for name, ref in self._refs.items()]
        ref = self._refs.get("GIT_SYNC_REV") or self._refs.get("GIT_SYNC_BRANCH")
        done = [f"--git={self._git}@{ref}" if ref else f"--git={self._git}"]
        of_arena = "--sync-source" in self._seen and "--working-dir" not in self._seen
        if of_arena and self._place == PODS:
            self._notify(
                f"the code goes below {CODE_PARENT}, as in Arena; use --working-dir for another "
                "folder"
            )
            done.append(f"--working-dir={CODE_PARENT}")
        return done

    def _next_word(self, name: str) -> str:
        if not self._flags:
            raise Invalid(f"{name} needs a value")
        return self._flags.pop(0)

    def _optional_value(self, value: str, equals: str, row: Row) -> str:
        """The value of a flag that can stand alone. The next word is its value if it is `true` or
        `false`, or if the flag is not a switch and the word is not a flag."""
        following = self._flags[0] if self._flags and not equals else "-"
        if following in ("true", "false") or not (row.alone == "true" or following.startswith("-")):
            value = self._flags.pop(0)
        return row.alone if value in ("", "true") else value

    def _translate(self, name: str, value: str, row: Row) -> list[str]:
        if name == "--env" and (found := _GIT_REF.match(value)):
            self._refs[found[1]] = found[2]
            return []
        if name == "--env":
            return [f"--env={value}"]
        if name in ("--git", "--sync-source"):
            self._git = value
            return []
        if name == "--sync-mode":
            if value != "git":
                raise Invalid(f"--sync-mode={value}: code comes from git, or is in the image")
            return []
        if name == "--config-file":
            raise Invalid(_config_file(value) if self._place == PODS else _unsupported(name, row))
        if value == "false" and row.alone:
            return []
        if self._place == LOCAL and name == "--gpus" and (self._has_rank_count or value == "0"):
            return []
        if name == "--workers":
            settings.nodes(value, name)
        if self._place not in row.words:
            if not row.note:
                raise Invalid(_unsupported(name, row))
            self._notify(f"{name}={value} has no effect: {row.note}")
            return []
        number = next(self._numbers) if name == "--data-dir" else 0
        return [_fill(text, name, value, number) for text in row.words[self._place]]


def _canonical_name(name: str) -> str:
    """`--workingDir`, as in older Arena versions, and `--working_dir` become --working-dir."""
    return re.sub("[A-Z]+", lambda found: f"-{found[0].lower()}", name.replace("_", "-"))


def _unsupported(name: str, row: Row) -> str:
    pods, slurm = "pods (submit --on k8s)", "Slurm jobs (--on slurm)"
    who = pods if SLURM not in row.words else f"{pods} and {slurm}"
    return f"{name} is only for {who}: leave it out here"


def _config_file(value: str) -> str:
    file, _, path = value.partition(":")
    folder, _, name = (path or file).rpartition("/")
    return (
        f"--config-file={value}: pods read it from a ConfigMap: `kubectl create configmap NAME "
        f"--from-file={name}={file}`, and here --volume NAME=configmap:NAME:{folder or '/FOLDER'}"
    )


def _fill(text: str, name: str, value: str, number: int) -> str:
    """Fill this value into one of our words. Raises Invalid."""
    key, _, count = value.rpartition("=")
    if "{key}" in text and not (key and count.isdecimal()):
        raise Invalid(f"{name}={value} is not KEY=N")
    host, _, mount = value.partition(":")
    if name == "--data-dir" and "{mount}" not in text and mount not in ("", host):
        raise Invalid(f"--data-dir={value}: nothing is mounted here; the folder stays {host}")
    seconds = _seconds(name, value) if "s}" in text else 0
    return text.format(
        value=value, key=key, count=count, number=number, seconds=seconds,
        host=host, mount=mount or host,
        minutes=-(-seconds // 60), taint=value.partition(",")[0],
        mem=re.sub(r"([KMGT])i\Z", r"\1", value),
    )  # fmt: skip


def _seconds(name: str, text: str) -> int:
    """Seconds of `2h`, `1h30m` or `90`."""
    found = _TIME.match(text)
    if not text or found is None:
        raise Invalid(f"{name}={text} is not a time: write 90s, 30m, 2h or 1d")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _command(text: str) -> tuple[list[str], list[str]]:
    """Split a one-string command into launcher flags, and `--` with the program."""
    try:
        words = shlex.split(text)
    except ValueError as wrong:
        raise Invalid(f"the command {text!r} cannot be read: {wrong}") from None
    simple = not _SHELL.search(text)
    if LAUNCHER.search(text) and (not simple or words[0].rpartition("/")[2] in SHELLS):
        raise Invalid(
            f"the command {text!r} needs a shell, and each rank would start its own launcher: "
            "give only the launcher's command; use --working-dir instead of cd and --env for "
            "variables"
        )
    return _program(words) if simple else (["--no-python"], ["--", "sh", "-c", text])


def _program(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """As `_command`, for a command that is already split into words."""
    name = words[0].rpartition("/")[2]
    if re.fullmatch(_PYTHON, name) and (found := _MODULES.match(" ".join(words[1:4]))):
        name, words = LAUNCHERS[0], words[found[0].count(" ") + 1 :]
    if name in LAUNCHERS:
        ours = get_args_parser({})
        at = 1 + ours.script_at(words[1:])
        rendezvous_flags = [
            f"--{dest.replace('_', '-')}" for dest in (*RENDEZVOUS_FLAGS, "nnodes", "node_rank")
        ]
        return without_flags(words[1:at], rendezvous_flags), ["--", *words[at:]]
    if not re.fullmatch(_PYTHON, name):
        return ["--no-python"], ["--", *words]
    rest = words[2:] if words[1:2] == ["-u"] else words[1:]
    if rest[:1] == ["-m"]:
        return ["--module"], ["--", *rest[1:]]
    if rest and rest[0].startswith("-"):  # Python's own options, such as -c
        return ["--no-python"], ["--", *words]
    return [], ["--", *rest]
