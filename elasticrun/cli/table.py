"""The table of flags: torchrun's, those of newer torchruns, dlrover-run's, and ours.

One row per flag. `tests/compat/test_flags.py` compares the rows with the installed torch's parser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from elasticrun import config

TORCHRUN = "torchrun"
"""The origin of the flags that torchrun 2.13 has. They may be abbreviated, whatever other flags are
added."""
NEWER = "torchrun 2.14+"
DLROVER = "dlrover-run"
OURS = "elasticrun"


class Flag(NamedTuple):
    """One flag, as a row of the table.

    `name` is the long spelling with dashes; the one with underscores exists as well. `kind`
    converts text to the value, or raises ValueError; None makes the flag a switch. `expects`
    describes a valid value, for the error message. `env` is the variable of the default: "" for
    none, "*" for the usual name (PET_<DEST>; ELASTICRUN_<DEST> for a flag of ours; see
    `variable_in`).
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
        """The documented environment variable for its default, "" for none."""
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
    "size": "number of processes",
    "rdzv": "rendezvous",
    "trust": "authentication and TLS",
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

Elastic launcher for distributed PyTorch; replaces torchrun, with the same flags
and the same environment in the ranks. Words after the script are its arguments.

  elasticrun --nproc-per-node=8 train.py    8 ranks on this machine
  elasticrun --nnodes=1:10 train.py         1 to 10 machines that join and leave
  elasticrun --hosts a,b train.py           hosts a and b, by ssh
  elasticrun --srun train.py                all nodes of a Slurm job

the options that most jobs need:
  --nproc-per-node N|auto|gpu|cpu   ranks on each node [1]
  --nnodes N|MIN:MAX                number of nodes, or its limits [1]
  --rdzv-endpoint HOST[:PORT]       address of the rendezvous
  --rdzv-id ID                      name of the job, the same on all nodes
  --token-file FILE                 secret of the job, the same on all nodes
  --max-restarts N                  restarts after failures [0; elastic: 3]
  -m, --module, or --no-python      the script is a module, or any program
  --log-dir DIR, -t, --tee 3        write output to files; also show it
  --network-check                   probe nodes and links before training
  --save-at-breakpoint              write newest snapshot after a failure
  --dry-run [-v]                    print what would run, and each setting
  --version, -h, --help, --help-all the version; this page; every option

subcommands, each with its own --help (JOB: a name or a prefix of one):
  elasticrun submit -- SCRIPT       start a job that outlives this terminal
  elasticrun list, status, prune    your jobs; one in detail; remove old ones
  elasticrun logs, ckpt ls [JOB]    output of its ranks; its checkpoints
  elasticrun top, stacks, events    its ranks' activity and stacks; its events
  elasticrun incidents [JOB] [N]    what has interrupted the training
  elasticrun scale JOB N            set its maximum number of nodes
  elasticrun suspend, resume JOB    save and free its nodes; resume
  elasticrun stop, delete JOB       end it; also remove its files
  elasticrun exec JOB -- COMMAND    run a command on one of its nodes
  elasticrun restart [JOB]          restart its ranks
  elasticrun exclude, include NODE  exclude a node; admit it again
  elasticrun join, doctor, demo     join a job; check this machine; see it work
  elasticrun render, convert, shim  files for schedulers; replace torchrun
  elasticrun master, warm, operator run a master; cache torch; ElasticJobs
  elasticrun replay, completion     a master's decisions; shell completion
"""
"""The text of --help: one screen. `--help-all` prints everything."""

EPILOG: Final = """\
verbs, if they come first and no file has that name (each has its own --help):
  elasticrun list               list your jobs: running, ended, or lost
  elasticrun prune              remove the run folders of jobs that have ended
  elasticrun submit ... -- SCRIPT  start a job that outlives this terminal
  elasticrun status [JOB]       print the state of a job, its nodes, and what it waits for
  elasticrun top [JOB]          show what a running job's ranks are doing, every two seconds
  elasticrun stacks [JOB]       show the stacks of its ranks, grouped
  elasticrun events [JOB]       show its events
  elasticrun incidents [JOB] [N]  show what has interrupted its training, and the cost
  elasticrun stop [JOB]         end it on all of its nodes
  elasticrun restart [JOB]      restart its ranks
  elasticrun exclude NODE [JOB] exclude a node from it
  elasticrun include NODE [JOB] admit the node again
  elasticrun scale JOB N        set its maximum number of nodes
  elasticrun suspend JOB        save its state, stop it and free its nodes
  elasticrun resume JOB         resume it in the same run folder
  elasticrun delete JOB         end it and remove its run folder
  elasticrun exec JOB -- COMMAND  run a command on one of its nodes
  elasticrun logs [JOB]         print the output of a job's ranks
  elasticrun ckpt ls|verify|prune DIR  list, verify or remove checkpoints
  elasticrun join HOST:PORT CODE  make this machine a node of a running job
  elasticrun doctor             check this machine, with advice for each problem
  elasticrun shim -- CMD        run a command whose torchrun is elasticrun
  elasticrun demo               show a killed rank, a killed node, a new node and a hang, in 30 s
  elasticrun master             run a job master by hand, on a host without ranks
  elasticrun replay TRACE       replay the decisions in a master's trace, with reasons
  elasticrun render TARGET      print manifests for Kubernetes, or the script for Slurm
  elasticrun operator           run the operator for ElasticJobs in a Kubernetes cluster
  elasticrun convert FILE       convert another operator's job to an ElasticJob or a Slurm script
  elasticrun completion SHELL   print the completion script for bash or zsh
  elasticrun warm               keep a process that has imported torch, for later jobs

Flags may be written with underscores, and torchrun's may be abbreviated as in torchrun. Words after
the script are its arguments. A flag overrides the variable in its brackets. Every PET_ variable has
an ELASTICRUN_ form, which takes precedence: ELASTICRUN_NNODES overrides PET_NNODES."""


def comma_separated(text: str) -> list[str]:
    """Parse comma-separated items; a doubled comma is a comma inside an item."""
    mark = "\0"
    return [item.replace(mark, ",") for item in text.replace(",,", mark).split(",")]


def seconds(text: str) -> int | float:
    """Parse seconds; a whole number becomes an int, as in torchrun. Raises ValueError."""
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
            "allowed number."),
        _flag("--nproc-per-node", _TEXT, "N|auto|cpu|gpu|xpu", "1", "Ranks on this node; nodes may "
            "differ. gpu, xpu, cpu: one per device or core; auto: one per accelerator, or per core "
            "without any."),
        _switch("--standalone", "One node, with its own master on a free port."),
        _flag("--node-unit", _WHOLE, "N", 1, "Rounds have a multiple of this many nodes; the rest "
            "wait as spares.", DLROVER),
        _switch("--auto-config", "Use $NODE_NUM as the number of nodes, and one rank per GPU.",
            DLROVER),
    ),
    "rdzv": (
        _flag("--rdzv-backend", _TEXT, "WORD", "static", "How nodes find the master: static "
            "(--master-addr and --master-port), or c10d (--rdzv-endpoint); for a plug-in of the "
            "group torchrun.handlers, torchrun takes over."),
        _flag("--rdzv-endpoint", _TEXT, "HOST[:PORT]", "", "Address of the master; the node with "
            "this address starts it. Default port: 29400. file:///PATH: nodes find each other by a "
            "file in a shared folder."),
        _flag("--rdzv-id", _TEXT, "ID", "none", "Name of the job, the same on all its nodes."),
        _flag("--rdzv-conf", _TEXT, "KEY=VALUE,...", "", "Times of the rendezvous in seconds: "
            "join_timeout, last_call_timeout, heartbeat_timeout, master_lost_timeout, "
            "grow_cooldown, probe_timeout, straggler_time; is_host=0|1; node_unit=N."),
        _flag("--master-addr", _TEXT, "HOST", "127.0.0.1", "Address of the node with rank 0 "
            "(static only)."),
        _flag("--master-port", _WHOLE, "PORT", None, "Port of --master-addr; the ranks see it as "
            "MASTER_PORT (static only; 29500)."),
        _flag("--master-store", _TEXT, "URL", "", "Keep the job's record and leadership in etcd "
            "(etcd://HOST:PORT,...), so that another node takes over if the master's host fails. "
            "Needs --rdzv-id.", OURS),
        _flag("--hosts", _TEXT, "HOST,...", "", "Start the agents on these hosts by ssh, which "
            "need the same Python environment and folder; HOST:N: N ranks there.", OURS, env=""),
        _flag("--hostfile", _TEXT, "FILE", "", "Like --hosts, but read from a file with a line for "
            "each host: HOST slots=N.", OURS, env=""),
        _flag("--ssh", _TEXT, "COMMAND", "ssh", "The command that reaches a host, with your "
            "options (ssh -J gate).", OURS),
        _switch("--srun", "In a Slurm batch script or salloc: run this command through srun, once "
            "on each node of the job.", OURS, env=""),
    ),
    "trust": (
        _flag("--token-file", _TEXT, "FILE", "", "File with the job's secret, the same on all "
            "nodes (or $ELASTICRUN_TOKEN); it is never sent over the network.", OURS),
        _flag("--tls-cert", _TEXT, "FILE", "", "Certificate (PEM) of this node, for TLS as master "
            "and as client.", OURS),
        _flag("--tls-key", _TEXT, "FILE", "", "Private key (PEM) of --tls-cert.", OURS),
        _flag("--tls-ca", _TEXT, "FILE", "", "CA certificates (PEM) that must have signed a "
            "peer's.", OURS),
    ),
    "node": (
        _flag("--node-rank", _WHOLE, "N", 0, "Rank of this node; only a preference unless "
            "--rdzv-backend is static."),
        _flag("--local-addr", _TEXT, "HOST", None, "Address by which other nodes reach this node; "
            "default: that of its connection to the master."),
        _flag("--node-id", _TEXT, "NAME", "", "Name that identifies this node to the master across "
            "restarts; default: host and slot.", OURS),
        _flag("--role", _TEXT, "NAME", "default", "Role of the ranks: their ROLE_NAME, and the "
            "prefix of their console lines."),
    ),
    "program": (
        _switch("--module", "The script is a module, as in python -m.", short="-m"),
        _switch("--no-python", "The script is any program, run without Python."),
        _flag("--git", _TEXT, "URL[@REF]", "", "Run this repository's code, at a branch, tag or "
            "commit, checked out once per node in code/REPO; the script's path is relative to "
            "it.", OURS),
        _flag("--data", _TEXT, "NAME:/PATH,...", "", "Folders that the script reads; they must "
            "exist before it starts (in Kubernetes: the claim NAME, mounted at PATH).", OURS),
        _switch("--run-path", "Run the script with runpy.run_path in a child of multiprocessing."),
        _flag("--start-method", _TEXT, "", "spawn", "How multiprocessing starts ranks that run a "
            "function or --run-path; no effect on scripts.", choices=("spawn", "fork",
            "forkserver")),
        _flag("--launch", _TEXT, "", "auto", "How scripts are started: forked from a process that "
            "has imported torch, exec'd, or (auto) forked unless that is unsafe.", OURS,
            choices=("auto", "fork", "exec")),
        _flag("--preload", _TEXT, "MODULE,...", "", "Modules to import besides torch before the "
            "fork; ranks then share the side effects of these imports (docs/warm.md).", OURS),
        _flag("--standby", _TEXT, "auto|off|SECONDS", "off", "Start a replacement of each rank "
            "ahead of time and run it up to its first effect, so that a restart does not wait for "
            "the script's imports (auto: 10 s after the ranks; docs/standby.md).", OURS),
        _switch("--warm", "Leave a process running that has imported torch, from which later jobs "
            "are forked (elasticrun warm).", OURS),
    ),
    "restart": (
        _flag("--max-restarts", _WHOLE, "N", 0, "Maximum number of restarts after failures. "
            f"Default: 0; {config.ELASTIC_RESTARTS} with --nnodes=MIN:MAX, with submit and in "
            "an ElasticJob."),
        _flag("--restart-window", _SECONDS, "SECONDS", config.RESTART_WINDOW, "Count only failures "
            "of the last SECONDS against --max-restarts; 0: all failures.", OURS),
        _flag("--restart-backoff", _SECONDS, "SECONDS", config.RESTART_BACKOFF, "Longest wait "
            "before restarting ranks that fail right after their start; 0: no wait.", OURS),
        _flag("--restart-grace", _SECONDS, "SECONDS", None, "Time between SIGTERM and SIGKILL when "
            "ranks are restarted; default: the shutdown timeout.", OURS),
        _flag("--shutdown-timeout", _SECONDS, "SECONDS", None, "Time between SIGTERM and SIGKILL "
            "($TORCH_ELASTIC_SHUTDOWN_TIMEOUT, 30)."),
        _flag("--exit-barrier-timeout", _SECONDS, "SECONDS", None, "How long a node whose ranks "
            "are done waits for the others ($TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT); default: until "
            "the job ends.", NEWER),
        _flag("--departure-grace", _SECONDS, "SECONDS", config.DEPARTURE_GRACE, "Time between a "
            "signal of --signals-to-handle and the node's exit, in which ranks with a Checkpointer "
            "save a step; 0: none.", OURS),
        _flag("--child-exit-timeout", _SECONDS, "SECONDS", config.CHILD_EXIT_TIMEOUT, "After a "
            "successful end: how long processes that ranks left running (such as an upload) may "
            "continue before SIGTERM; 0: end them at once.", OURS),
        _flag("--signals-to-handle", _TEXT, "NAME,...", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "Signals "
            "that end the job; they are forwarded to the ranks, which are killed after the "
            "shutdown timeout."),
        _flag("--monitor-interval", _FLOAT, "SECONDS", 0.1, "Accepted, without effect: elasticrun "
            "waits for events and does not poll."),
        _flag("--grow", _TEXT, "", "auto", "When new nodes are admitted to a running job: auto "
            "waits for a good moment, now restarts the ranks at once.", OURS, choices=("auto",
            "now")),
        _flag("--exit-codes", _TEXT, "", "torchrun", "torchrun: 1 for every failure of ranks; "
            "scheduler: 93 (do not retry) if a retry cannot help, because the script itself failed "
            "or is missing.", OURS, choices=("torchrun", "scheduler")),
    ),
    "output": (
        _flag("--log-dir", _TEXT, "DIR", None, "Folder for log files; /dev/null: no files."),
        _flag("--redirects", _TEXT, "STREAMS", "0", "Streams that go to files: 0 none, 1 stdout, 2 "
            "stderr, 3 both, or by local rank (0:1,12:3).", short="-r"),
        _flag("--tee", _TEXT, "STREAMS", "0", "Streams that go to files and to the console (as "
            "--redirects).", short="-t"),
        _flag("--local-ranks-filter", _TEXT, "N,...", "", "Local ranks whose output the console "
            "shows; empty: all."),
        _flag("--duplicate-stdout-filters", _LIST, "TEXT,...", (), "Lines of tee'd stdout that "
            "contain one of these texts also go to filtered_stdout.log; write a comma as two."),
        _flag("--duplicate-stderr-filters", _LIST, "TEXT,...", (), "The same for stderr and "
            "filtered_stderr.log."),
        _flag("--log-line-prefix-template", _TEXT, "TEXT", "", "Prefix of console lines, with "
            "${role_name}, ${local_rank}, ${rank} and ${hostname} "
            "($TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE).", NEWER),
        _flag("--logs-specs", _TEXT, "NAME", None, "Plug-in of the group torchrun.logs_specs that "
            "decides where output goes.", env=""),
        _switch("--no-fold", "Print every rank's lines, even on a terminal, which otherwise shows "
            "identical lines of several ranks once.", OURS),
        _flag("--run-dir", _TEXT, "DIR", "", "The job's run folder, with its command, events, "
            "progress, result and log files. A job started again with the same folder resumes; one "
            "that has succeeded does not run again.", OURS),
        _flag("--name", _TEXT, "NAME", "", "The job's name in `elasticrun list`; default: its "
            "--rdzv-id, or its script's name.", OURS),
        _switch("--fresh", "Start the job of --run-dir over: existing files move to previous/.",
            OURS),
        _flag("--event-log-handler", _TEXT, "NAME", "null", "Where events are logged: null, "
            "console, dynamic_rendezvous."),
    ),
    "place": (
        _flag("--numa-binding", _TEXT, "", None, "Bind each rank to cores near its GPU (torch 2.9 "
            "or newer, and numactl).", env="",
            choices=("node", "socket", "exclusive", "core-complex")),
        _switch("--virtual-local-rank", "Every rank sees LOCAL_RANK=0, and only its own GPU."),
        _switch("--numa-affinity", "As --numa-binding=node, but ranks stay unbound if that fails.",
            DLROVER),
    ),
    "health": (
        _switch("--network-check", "Probe every node and its links before its first round; a node "
            "that fails is excluded and exits with code 75.", DLROVER),
        _switch("--comm-perf-test", "Measure one all_reduce over all healthy nodes before "
            "training.", DLROVER),
        _flag("--comm-perf-threshold", _RATE, "GB/S", 0.0, "Bus bandwidth in GB/s that "
            "--comm-perf-test must reach, or the job ends; 0: none.", OURS),
        _flag("--precheck", _WHOLE, "{0,1,2}", 0, "1: --network-check, and this node exits with "
            "code 75 if a check of elasticrun doctor fails; 2: also --comm-perf-test.", DLROVER),
        _switch("--exclude-straggler", "Exclude nodes that are slow in the network check or in "
            "training, but keep the minimum number of nodes.", DLROVER),
        _flag("--straggler-ratio", _NUMBER, "RATIO", config.SLOW_RATIO, "A node is slow if it "
            "takes at least this multiple of the others' median time.", OURS),
        _flag("--exclude-for", _SECONDS, "SECONDS", config.EXCLUDE_FOR, "How long an excluded node "
            "is refused; then it is probed again.", OURS),
        _flag("--health-cmd", _TEXT, "CMD", "", "Run this shell command on each node before it "
            "joins and regularly from then on: exit code 0 means healthy, 2 unknown; any other "
            "below 126 excludes the node, and the first line of output is the reason.", OURS),
        _flag("--health-cmd-interval", _SECONDS, "SECONDS", config.HEALTH_COMMAND_INTERVAL,
            "Time between two runs of --health-cmd.", OURS),
        _flag("--health-cmd-timeout", _SECONDS, "SECONDS", config.HEALTH_COMMAND_TIMEOUT, "Time "
            "limit of a run of --health-cmd; three runs over it in a row exclude the node.", OURS),
        _flag("--watch-devices", _TEXT, "", "auto", "Watch the GPUs and network ports of each node "
            "during training. auto: exclude a node whose GPU must be reset (fatal Xids, a lost "
            "GPU), and report other problems; tell: only report; off: do not watch.", OURS,
            choices=("auto", "tell", "off")),
        _flag("--accelerator", _TEXT, "NAME", "", "The device that probes use: nvidia, ascend or "
            "cpu (or dlrover-run's nvidia.com/gpu, ascend-npu); default: detected.", DLROVER),
    ),
    "watch": (
        _flag("--on-hang", _TEXT, "", "auto", "What happens if ranks hang. auto: restart all ranks "
            "30 s after their last progress if they certainly cannot continue; restart: also if "
            "they very probably cannot, after a longer wait; tell: only report it; off: do not "
            "watch ranks.", OURS, choices=("auto", "tell", "restart", "off")),
        _flag("--hang-limit", _SECONDS, "SECONDS", 0, "Restart all ranks after they have waited "
            "this long for a rank, even if it is working; 0: no limit.", OURS),
        _flag("--slot-price", _NUMBER, "PRICE", 0.0, "Price of one slot (such as a GPU) per hour, "
            "in any currency, from which costs in incidents, ledger and result are computed.",
            OURS),
    ),
    "saves": (
        _switch("--save-at-breakpoint", "After a failure, write the newest complete snapshot to "
            "storage as a checkpoint, in the background; also before the job ends with a "
            "failure.", DLROVER),
        _flag("--save-limit", _SECONDS, "SECONDS", config.SAVE_LIMIT, "Time limit for writing one "
            "checkpoint; then the attempt is given up.", OURS),
        _flag("--restore-step", _WHOLE, "STEP", None, "Resume from exactly this step, from memory "
            "or storage. Use it for one start, then remove it.", OURS),
        _flag("--on-corruption", _TEXT, "", "tell", "What happens if the snapshots of ranks with "
            "equal state differ. tell: report it; restart: return to the last step at which all "
            "were equal, and exclude the node the second time; exclude: exclude it at once; off: "
            "do not compare them.", OURS, choices=("tell", "restart", "exclude", "off")),
    ),
    "own": (
        _flag("--status-port", _WHOLE, "PORT", 0, "Port of the job's status page; 0: any free "
            "port.", OURS),
        _switch("--tensorboard", "Run TensorBoard on --logdir beside the master, if it is "
            "installed there.", OURS),
        _flag("--logdir", _TEXT, "DIR", "", "The folder that --tensorboard shows.", OURS),
        _flag("--on-event", _TEXT, "CMD|URL", "", "Receives each incident, each hang and the job's "
            "end: a command that reads one JSON object from stdin, or a URL for a POST.", OURS),
        _flag("--config", _TEXT, "FILE", "", "The settings file; default: elasticrun.toml of this "
            "folder, or [tool.elasticrun] in its pyproject.toml (docs/settings.md).", OURS),
        _flag("--profile", _TEXT, "NAME", "", "Also use the settings of [profile.NAME] of the "
            "settings file.", OURS),
        _switch("--no-config", "Use no settings file.", OURS, env=""),
        _switch("--dry-run", "Print what would run, and where each setting comes from.", OURS,
            env=""),
        _switch("--verbose", "With --dry-run: also print settings that have their defaults.", OURS,
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
"""The rows, by the key of their group."""

FLAGS: Final = tuple(flag._replace(group=key) for key, rows in _ROWS.items() for flag in rows)

TRUST: Final = tuple(flag for flag in FLAGS if flag.group == "trust")
"""Flags of every command that connects to a master, for jobs with a token or TLS."""

NO_EFFECT: Final = ("auto_tunning", "membind_policy", "training_port", "ucp_device_type")
"""dlrover-run flags that are accepted and have no effect in this version."""
