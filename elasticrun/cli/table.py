"""The table of flags: torchrun's, those of newer torchruns, dlrover-run's, and ours.

One row per flag. `tests/compat/test_flags.py` compares the rows with the installed torch's parser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from elasticrun import config

TORCHRUN = "torchrun"
"""Origin of the flags of torchrun 2.13: their abbreviations stay valid whatever flags are added."""
NEWER = "torchrun 2.14+"
DLROVER = "dlrover-run"
OURS = "elasticrun"


class Flag(NamedTuple):
    """One flag, as a row of the table.

    `name` is the long spelling with dashes; the one with underscores exists as well. `kind`
    converts text to the value (ValueError if it cannot; `wants` then describes the expected value);
    None makes it a switch. `env` is the variable of the default: "" for none, "*" for the usual
    name (PET_<DEST>; ELASTICRUN_<DEST> for a flag of ours; see `variable_in`).
    """

    name: str
    help: str
    group: str
    kind: Callable[[str], Any] | None = None
    expects: str = "a value"
    default: Any = None
    choices: tuple[str, ...] = ()
    metavar: str = ""
    short: str = ""
    env: str = "*"
    origin: str = TORCHRUN

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        underscored = "--" + self.dest
        names = (self.short,) if self.short else ()
        return (*names, self.name, *((underscored,) if underscored != self.name else ()))

    @property
    def variable(self) -> str:
        """The environment variable for its default, "" for none."""
        if self.env != "*":
            return self.env
        return ("ELASTICRUN_" if self.origin == OURS else "PET_") + self.dest.upper()

    def variable_in(self, environ: Mapping[str, str]) -> str:
        """The variable that sets its default in this environment, "" for none. If the usual name is
        PET_<DEST>, a nonempty ELASTICRUN_<DEST> takes precedence."""
        ours = f"ELASTICRUN_{self.dest.upper()}"
        if self.env == "*" and environ.get(ours):
            return ours
        return self.variable if self.variable in environ else ""


GROUPS: Final = {
    "size": "how many processes",
    "rdzv": "where the nodes meet",
    "trust": "who may join",
    "node": "this node",
    "program": "the program",
    "restart": "restarting and stopping",
    "output": "output",
    "place": "devices and cores",
    "health": "node health",
    "watch": "hangs",
    "saves": "snapshots (of scripts with a Checkpointer)",
    "own": "elasticrun itself",
    "dlrover": "accepted from dlrover-run",
}

HELP: Final = """\
usage: elasticrun [options] script [arguments of the script ...]

Elastic launcher for distributed PyTorch, in the place of torchrun: the same
flags, the same environment in the ranks. What follows the script is its own.

  elasticrun --nproc-per-node=8 train.py    8 ranks on this machine
  elasticrun --nnodes=1:10 train.py         1 to 10 machines that come and go
  elasticrun --hosts a,b train.py           machines that ssh reaches
  elasticrun --srun train.py                all nodes of a Slurm job

the options that most jobs need:
  --nproc-per-node N|auto|gpu|cpu   ranks on each node [1]
  --nnodes N|MIN:MAX                nodes, or the fewest and most of them [1]
  --rdzv-endpoint HOST[:PORT]       where the nodes meet
  --rdzv-id ID                      name of the job, the same on all nodes
  --token-file FILE                 secret of the job, the same on all nodes
  --max-restarts N                  restarts after failures [0; elastic: 3]
  -m, --module, or --no-python      the script is a module, or any program
  --log-dir DIR, -t, --tee 3        files of the ranks' output; on screen, too
  --network-check                   probe nodes and links before training
  --save-at-breakpoint              write the newest snapshot after a failure
  --dry-run [-v]                    print what would run, and why so
  --version, -h, --help, --help-all the version; this page; every option

subcommands, each with its own --help (JOB: a name, or its beginning):
  elasticrun submit -- SCRIPT       a job that goes on without this terminal
  elasticrun list, status, prune    your jobs; how one does; forget old ones
  elasticrun logs, ckpt ls [JOB]    what its ranks have written; checkpoints
  elasticrun top, stacks, events    what its ranks do; where; what has happened
  elasticrun incidents [JOB] [N]    what has stopped the training
  elasticrun scale JOB N            set how many nodes it has at most
  elasticrun suspend, resume JOB    save and let go of its nodes; go on
  elasticrun stop, delete JOB       end it; remove its files, too
  elasticrun exec JOB -- COMMAND    run a command on a node of it
  elasticrun restart [JOB]          start its ranks again
  elasticrun exclude, include NODE  keep a node out of it; let it in again
  elasticrun join, doctor           join a running job; check this machine
  elasticrun render, convert        what Kubernetes or Slurm is to be given
  elasticrun master, warm, operator a master by hand; torch kept; ElasticJobs
  elasticrun replay, completion     a master's decisions again; for your shell
"""
"""The text of --help: one screen. `--help-all` prints everything."""

EPILOG: Final = """\
verbs, as the first word and where no file of that name exists (each has its own --help):
  elasticrun list               list your jobs: those that run, have ended, or are lost
  elasticrun prune              remove the run folders of jobs that have ended
  elasticrun submit ... -- SCRIPT  start a job that goes on without this terminal
  elasticrun status [JOB]       print the state of a job: its nodes, and what it waits for
  elasticrun top [JOB]          show what the ranks of a running job do, anew every two seconds
  elasticrun stacks [JOB]       show where its ranks are, grouped by their stacks
  elasticrun events [JOB]       show what has happened to it
  elasticrun incidents [JOB] [N]  show what has stopped its training, and what that cost
  elasticrun stop [JOB]         end it on all of its nodes
  elasticrun restart [JOB]      start its ranks again
  elasticrun exclude NODE [JOB] keep a node out of it
  elasticrun include NODE [JOB] let it in again
  elasticrun scale JOB N        set how many nodes it has at most
  elasticrun suspend JOB        have it save a step and let go of what it runs on
  elasticrun resume JOB         go on with it, in the same run folder
  elasticrun delete JOB         end it and remove its run folder
  elasticrun exec JOB -- COMMAND  run a command on a node of it
  elasticrun logs [JOB]         print what the ranks of a job have written
  elasticrun ckpt ls|verify|prune DIR  list checkpoints, compare them with their hashes, remove some
  elasticrun join HOST:PORT CODE  make this machine a node of a running job
  elasticrun doctor             say what is wrong with this machine, and what to do about it
  elasticrun master             run a job master by hand, on a host without ranks
  elasticrun replay TRACE       run the decisions of a master's trace again, each with its reason
  elasticrun render TARGET      print manifests for Kubernetes, or the script for Slurm
  elasticrun operator           see to the ElasticJobs of a Kubernetes cluster
  elasticrun convert FILE       print a job of another operator as an ElasticJob or a Slurm script
  elasticrun completion SHELL   print what bash or zsh needs to complete all of these
  elasticrun warm               keep a process that has torch imported, for later jobs

Every flag may be written with underscores; torchrun's may be abbreviated, as far as torchrun knows
what is meant. What stands behind the script is the script's. A flag beats the variable in its
brackets, and ELASTICRUN_NNODES beats PET_NNODES: all PET_ variables have such a form."""


def comma_separated(text: str) -> list[str]:
    """Comma-separated items; a doubled comma is a comma inside an item."""
    mark = "\0"
    return [item.replace(mark, ",") for item in text.replace(",,", mark).split(",")]


def seconds(text: str) -> int | float:
    """Seconds; whole numbers stay an int, as in torchrun."""
    try:
        return int(text)
    except ValueError:
        return _finite(text)


def _finite(text: str) -> float:
    value = float(text)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(text)
    return value


_Kind = tuple[Callable[[str], Any], str]

_TEXT: Final[_Kind] = (str, "a value")
_LIST: Final[_Kind] = (comma_separated, "a value")
_WHOLE: Final[_Kind] = (int, "a whole number")
_FLOAT: Final[_Kind] = (float, "a number")
_NUMBER: Final[_Kind] = (_finite, "a number")
_RATE: Final[_Kind] = (_finite, "a number of GB/s")
_SECONDS: Final[_Kind] = (seconds, "a number of seconds")


def _flag(
    name: str,
    kind: _Kind,
    metavar: str,
    default: Any,
    help: str,
    origin: str = TORCHRUN,
    **more: Any,
) -> Flag:
    convert, expects = kind
    return Flag(name, help, "", convert, expects, default, metavar=metavar, origin=origin, **more)


def _switch(name: str, help: str, origin: str = TORCHRUN, **more: Any) -> Flag:
    return Flag(name, help, "", origin=origin, **more)


_ROWS: Final[Mapping[str, tuple[Flag, ...]]] = {
    "size": (
        _flag("--nnodes", _TEXT, "N|MIN:MAX", "1:1", "Number of nodes, or the smallest and largest "
            "number that will do."),
        _flag("--nproc-per-node", _TEXT, "N|auto|cpu|gpu|xpu", "1", "Ranks on this node; nodes may "
            "differ. gpu, xpu, cpu: as many as there are; auto: as many as there are accelerators, "
            "else cores."),
        _switch("--standalone", "One node, with a master of its own on a free port."),
        _flag("--node-unit", _WHOLE, "N", 1, "Rounds have a multiple of this many nodes; the rest "
            "wait as spares.", DLROVER),
        _switch("--auto-config", "Take the number of nodes from $NODE_NUM and one rank for every "
            "GPU.", DLROVER),
    ),
    "rdzv": (
        _flag("--rdzv-backend", _TEXT, "WORD", "static", "How nodes find the master: static "
            "(--master-addr and --master-port), or c10d (--rdzv-endpoint); a plug-in of the group "
            "torchrun.handlers is left to torchrun."),
        _flag("--rdzv-endpoint", _TEXT, "HOST[:PORT]", "", "Where the master is; the node that has "
            "this address starts it. The port is 29400 where none is given. file:///PATH: a file "
            "in a folder that all nodes share, by which they find each other."),
        _flag("--rdzv-id", _TEXT, "ID", "none", "Name of the job, the same on all its nodes."),
        _flag("--rdzv-conf", _TEXT, "KEY=VALUE,...", "", "Times of the rendezvous in seconds: "
            "join_timeout, last_call_timeout, heartbeat_timeout, master_lost_timeout, "
            "grow_cooldown, probe_timeout, straggler_time; is_host=0|1; node_unit=N."),
        _flag("--master-addr", _TEXT, "HOST", "127.0.0.1", "Address of the node with rank 0 "
            "(static only)."),
        _flag("--master-port", _WHOLE, "PORT", None, "Port there; the ranks see it as MASTER_PORT "
            "(static only; 29500)."),
        _flag("--master-store", _TEXT, "URL", "", "Keep the job's record and who leads in etcd "
            "(etcd://HOST:PORT,...): another node takes over when the master's host dies. Needs "
            "--rdzv-id.", OURS),
        _flag("--hosts", _TEXT, "HOST,...", "", "Start the agents on these hosts by ssh, where the "
            "same Python environment and folder are; HOST:N: N ranks there.", OURS, env=""),
        _flag("--hostfile", _TEXT, "FILE", "", "The same with a file of hosts, one a line: HOST "
            "slots=N.", OURS, env=""),
        _flag("--ssh", _TEXT, "COMMAND", "ssh", "What reaches a host, with options of yours (ssh "
            "-J gate).", OURS),
        _switch("--srun", "In a Slurm batch script or salloc: start this command again by srun, "
            "once on each node of the job.", OURS, env=""),
    ),
    "trust": (
        _flag("--token-file", _TEXT, "FILE", "", "File with the job's secret, the same on all "
            "nodes (or $ELASTICRUN_TOKEN); it never crosses the network.", OURS),
        _flag("--tls-cert", _TEXT, "FILE", "", "Certificate (PEM) of this node, for the master's "
            "TLS and as a client.", OURS),
        _flag("--tls-key", _TEXT, "FILE", "", "Private key (PEM) of --tls-cert.", OURS),
        _flag("--tls-ca", _TEXT, "FILE", "", "Certificates (PEM) that a peer's must be signed by.",
            OURS),
    ),
    "node": (
        _flag("--node-rank", _WHOLE, "N", 0, "Rank of this node; a wish where --rdzv-backend is "
            "not static."),
        _flag("--local-addr", _TEXT, "HOST", None, "Address of this node for the others, where the "
            "one that its connection to the master uses is the wrong one."),
        _flag("--node-id", _TEXT, "NAME", "", "Name by which the master knows this node over its "
            "lives, where host and slot will not do.", OURS),
        _flag("--role", _TEXT, "NAME", "default", "Role of the ranks: ROLE_NAME, and the prefix of "
            "their lines."),
    ),
    "program": (
        _switch("--module", "The script is a module, as for python -m.", short="-m"),
        _switch("--no-python", "The script is a program of its own and is run as it is."),
        _flag("--git", _TEXT, "URL[@REF]", "", "Run this repository's code, at a branch, tag or "
            "commit, checked out once a node in code/REPO; the script's path begins there.", OURS),
        _flag("--data", _TEXT, "NAME:/PATH,...", "", "Folders that the script reads, which must be "
            "there before it starts (in Kubernetes a claim NAME, mounted there).", OURS),
        _switch("--run-path", "Run the script by runpy.run_path in a child of multiprocessing."),
        _flag("--start-method", _TEXT, "", "spawn", "How multiprocessing starts ranks whose "
            "program is a function or --run-path; scripts are not concerned.",
            choices=("spawn", "fork", "forkserver")),
        _flag("--launch", _TEXT, "", "auto", "How scripts are started: forked from a process that "
            "has torch ready, exec'd, or forked unless that cannot be trusted.", OURS,
            choices=("auto", "fork", "exec")),
        _flag("--preload", _TEXT, "MODULE,...", "", "Modules to have ready beside torch, at the "
            "price that ranks share what their import does (docs/warm.md).", OURS),
        _switch("--warm", "Leave a process behind that has torch imported, for later jobs to begin "
            "from (elasticrun warm).", OURS),
    ),
    "restart": (
        _flag("--max-restarts", _WHOLE, "N", 0, "How often the job's ranks are restarted after a "
            f"failure; {config.ELASTIC_RESTARTS} where none is given with --nnodes=MIN:MAX, by "
            "submit and in an ElasticJob."),
        _flag("--restart-window", _SECONDS, "SECONDS", config.RESTART_WINDOW, "Count only the "
            "failures of this many seconds; 0: all of the job.", OURS),
        _flag("--restart-backoff", _SECONDS, "SECONDS", config.RESTART_BACKOFF,
            "Longest wait before ranks that die at once are restarted; 0: none.", OURS),
        _flag("--restart-grace", _SECONDS, "SECONDS", None, "Time between SIGTERM and SIGKILL when "
            "ranks are restarted; the shutdown timeout where none is given.", OURS),
        _flag("--shutdown-timeout", _SECONDS, "SECONDS", None, "Time between SIGTERM and SIGKILL "
            "($TORCH_ELASTIC_SHUTDOWN_TIMEOUT, 30)."),
        _flag("--exit-barrier-timeout", _SECONDS, "SECONDS", None, "How long a node whose ranks "
            "are done waits for the others ($TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT); as long as the "
            "job runs where none is given.", NEWER),
        _flag("--departure-grace", _SECONDS, "SECONDS", config.DEPARTURE_GRACE,
            "Time from such a signal until a node leaves, in which its ranks save a step, if they "
            "have a Checkpointer; 0: none.", OURS),
        _flag("--child-exit-timeout", _SECONDS, "SECONDS", config.CHILD_EXIT_TIMEOUT,
            "After a clean end: how long processes that ranks have left running (an upload, say) "
            "may go on before they get SIGTERM; 0: they are ended at once.", OURS),
        _flag("--signals-to-handle", _TEXT, "NAME,...", "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "Signals that end the job: passed on to the ranks, which are killed after the shutdown "
            "timeout."),
        _flag("--monitor-interval", _FLOAT, "SECONDS", 0.1, "Accepted; elasticrun waits for events "
            "and does not poll."),
        _flag("--grow", _TEXT, "", "auto", "When nodes that come late are let in: auto waits for a "
            "good moment, now restarts the ranks at once.", OURS, choices=("auto", "now")),
        _flag("--exit-codes", _TEXT, "", "torchrun", "torchrun: 1 for every failure of ranks; "
            "scheduler: 93 (do not try again) where another try cannot help, as the script itself "
            "has failed or is missing.", OURS, choices=("torchrun", "scheduler")),
    ),
    "output": (
        _flag("--log-dir", _TEXT, "DIR", None, "Folder for log files; /dev/null for none at all."),
        _flag("--redirects", _TEXT, "STREAMS", "0", "Streams that go to files: 0 none, 1 stdout, 2 "
            "stderr, 3 both, or by local rank (0:1,12:3).", short="-r"),
        _flag("--tee", _TEXT, "STREAMS", "0", "Streams that go to files and to the console (as "
            "--redirects).", short="-t"),
        _flag("--local-ranks-filter", _TEXT, "N,...", "", "Local ranks whose output the console "
            "shows; all where empty."),
        _flag("--duplicate-stdout-filters", _LIST, "TEXT,...", (), "Lines of tee'd stdout with one "
            "of these texts also go to filtered_stdout.log; two commas stand for one."),
        _flag("--duplicate-stderr-filters", _LIST, "TEXT,...", (), "The same for stderr and "
            "filtered_stderr.log."),
        _flag("--log-line-prefix-template", _TEXT, "TEXT", "", "Prefix of console lines, with "
            "${role_name}, ${local_rank}, ${rank} and ${hostname} "
            "($TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE).", NEWER),
        _flag("--logs-specs", _TEXT, "NAME", None, "Plug-in of the group torchrun.logs_specs that "
            "says where output goes.", env=""),
        _switch("--no-fold", "Show each line of every rank, where a terminal would show lines that "
            "ranks have in common once.", OURS),
        _flag("--run-dir", _TEXT, "DIR", "", "The job's run folder: what was started, what "
            "happened, its progress, how it ended, its log files. A job that is started with the "
            "same folder again goes on in it; one that has succeeded is not run again.", OURS),
        _flag("--name", _TEXT, "NAME", "", "What the job is called in `elasticrun list`; else its "
            "--rdzv-id, or its script's name.", OURS),
        _switch("--fresh", "Run the job of --run-dir from the beginning: what is there goes to "
            "previous/.", OURS),
        _flag("--event-log-handler", _TEXT, "NAME", "null", "Where events are logged: null, "
            "console, dynamic_rendezvous."),
    ),
    "place": (
        _flag("--numa-binding", _TEXT, "", None, "Bind each rank to cores near its GPU (torch 2.9 "
            "or newer, and numactl).", env="",
            choices=("node", "socket", "exclusive", "core-complex")),
        _switch("--virtual-local-rank", "Every rank sees LOCAL_RANK=0 and its own GPU as the only "
            "one."),
        _switch("--numa-affinity", "--numa-binding=node, and unbound ranks where that fails.",
            DLROVER),
    ),
    "health": (
        _switch("--network-check", "Probe every node and its links before its first round; a node "
            "that fails is excluded and ends with exit code 75.", DLROVER),
        _switch("--comm-perf-test", "Measure one all_reduce over all good nodes before training.",
            DLROVER),
        _flag("--comm-perf-threshold", _RATE, "GB/S", 0.0, "Bus bandwidth in GB/s that "
            "--comm-perf-test must reach, or the job ends; 0: none.", OURS),
        _flag("--precheck", _WHOLE, "{0,1,2}", 0, "1: --network-check, and what elasticrun doctor "
            "calls failed ends this node with exit code 75; 2: --comm-perf-test as well.", DLROVER),
        _switch("--exclude-straggler", "Exclude slow nodes, found by the network check or while "
            "training; never below the smallest number of nodes.", DLROVER),
        _flag("--straggler-ratio", _NUMBER, "RATIO", config.SLOW_RATIO, "A node is slow from this "
            "multiple of the others' median time on.", OURS),
        _flag("--exclude-for", _SECONDS, "SECONDS", config.EXCLUDE_FOR, "How long an excluded node "
            "is refused; then it is probed anew.", OURS),
        _flag("--accelerator", _TEXT, "NAME", "", "What probes use: nvidia, ascend or cpu (or "
            "dlrover-run's nvidia.com/gpu, ascend-npu); found by itself where none is given.",
            DLROVER),
    ),
    "watch": (
        _flag("--on-hang", _TEXT, "", "auto", "What follows when ranks wait for one that does not "
            "come: auto restarts all ranks, 30 s after the last movement, where it is certain that "
            "they cannot go on; restart: also where all evidence says so, after as long as that "
            "place may take; tell: nothing is done; off: nobody looks.",
            OURS, choices=("auto", "tell", "restart", "off")),
        _flag("--hang-limit", _SECONDS, "SECONDS", 0, "Restart all ranks when they have waited so "
            "long for any rank, even one that works; 0: no limit.", OURS),
        _flag("--slot-price", _NUMBER, "PRICE", 0.0, "What one slot (a GPU, say) costs for an "
            "hour, in any currency: incidents, ledger and result then say what they cost.", OURS),
    ),
    "saves": (
        _switch("--save-at-breakpoint", "After a failure, write the newest whole snapshot out as a "
            "checkpoint, in the background; before the job ends in one too.", DLROVER),
        _flag("--save-limit", _SECONDS, "SECONDS", config.SAVE_LIMIT, "Longest time for writing "
            "one checkpoint; then the attempt is given up.", OURS),
        _flag("--restore-step", _WHOLE, "STEP", None, "Go on from this step and no other, from "
            "memory or storage; for one start: take it off again.", OURS),
    ),
    "own": (
        _flag("--status-port", _WHOLE, "PORT", 0, "Port of the job's status page; 0: one that is "
            "free.", OURS),
        _switch("--tensorboard", "Run TensorBoard of --logdir beside the master, if it is "
            "installed there.", OURS),
        _flag("--logdir", _TEXT, "DIR", "", "What --tensorboard shows.", OURS),
        _flag("--on-event", _TEXT, "CMD|URL", "", "Told of each incident, each hang and the job's "
            "end: a command that reads one JSON from its stdin, or a URL for a POST.", OURS),
        _switch("--dry-run", "Print what would run, and where each setting comes from.", OURS,
            env=""),
        _switch("--verbose", "With --dry-run: the settings that have their defaults, too.", OURS,
            env="", short="-v"),
        _switch("--version", "Print the version.", OURS, env=""),
        _flag("--print-completion", _TEXT, "SHELL", None, "Print the completion script of a shell "
            "(needs shtab).", NEWER, env=""),
    ),
    "dlrover": (
        _flag("--membind-policy", _TEXT, "POLICY", "preferred", "Memory policy with "
            "--numa-affinity (nothing yet).", DLROVER),
        _switch("--auto-tunning", "Tune the data loader (nothing yet).", DLROVER),
        _flag("--training-port", _WHOLE, "PORT", 60000, "First port of Ascend's collectives "
            "(nothing yet).", DLROVER),
        _flag("--ucp-device-type", _TEXT, "NAME", "cpu", "Device of universal checkpoints (nothing "
            "yet).", DLROVER),
    ),
}  # fmt: skip
"""By group."""

FLAGS: Final = tuple(flag._replace(group=key) for key, rows in _ROWS.items() for flag in rows)

TRUST: Final = tuple(flag for flag in FLAGS if flag.group == "trust")
"""Flags that every command needs to connect to a job with a token or TLS."""

NOTHING_YET: Final = ("auto_tunning", "membind_policy", "training_port", "ucp_device_type")
"""dlrover-run flags that are accepted and have no effect in this version."""
