"""The table of flags: torchrun's, those that newer torchruns add, dlrover-run's, and ours.

One row a flag. `tests/compat/test_flags.py` compares the rows with the installed torch's parser.
"""

from __future__ import annotations

from typing import Final

from elasticrun import config
from elasticrun.cli.flags import DLROVER, NEWER, OURS, Flag

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
  elasticrun --srun train.py                all nodes of a Slurm job

the options that most jobs need:
  --nproc-per-node N|auto|gpu|cpu   ranks on each node [1]
  --nnodes N|MIN:MAX                nodes, or the fewest and most of them [1]
  --rdzv-endpoint HOST[:PORT]       where the nodes meet
  --rdzv-id ID                      name of the job, the same on all nodes
  --token-file FILE                 secret of the job, the same on all nodes
  --max-restarts N                  restarts after failures of ranks [0]
  -m, --module                      the script is a module
  --no-python                       the script is any program
  --log-dir DIR, -t, --tee 3        files of the ranks' output; on screen, too
  --network-check                   probe nodes and links before training
  --save-at-breakpoint              write the newest snapshot after a failure
  --dry-run                         print what would run, and why so
  --version, -h, --help             the version; this page
  --help-all                        every option, with its default

subcommands, each with its own --help:
  elasticrun status [ENDPOINT]      the state of your jobs, and why they wait
  elasticrun doctor                 what is wrong with this machine
  elasticrun render TARGET          what Kubernetes or Slurm is to be given
  elasticrun master                 a job master on a host without ranks
  elasticrun replay TRACE           a master's decisions again, with reasons
  elasticrun warm                   keep torch imported between jobs
"""
"""What --help prints: one screen. `--help-all` prints all there is."""

EPILOG: Final = """\
verbs, as the first word and where no file of that name exists (each has its own --help):
  elasticrun status [ENDPOINT]  print the state of a job: its nodes, and what it waits for
  elasticrun doctor             say what is wrong with this machine, and what to do about it
  elasticrun master             run a job master by hand, on a host without ranks
  elasticrun replay TRACE       run the decisions of a master's trace again, each with its reason
  elasticrun render TARGET      print the manifest for Kubernetes, or the script for Slurm
  elasticrun warm               keep a process that has torch imported, for later jobs

Every flag may be written with underscores; torchrun's may be abbreviated, as far as torchrun knows
what is meant. What stands behind the script is the script's. A flag beats the variable in its
brackets, and ELASTICRUN_NNODES beats PET_NNODES: all PET_ variables have such a form."""


def comma_separated(text: str) -> list[str]:
    """Items between commas; a doubled comma stands for one inside an item."""
    mark = "\0"
    return [item.replace(mark, ",") for item in text.replace(",,", mark).split(",")]


def seconds(text: str) -> int | float:
    """Seconds; whole ones stay an int, as torchrun has them."""
    try:
        return int(text)
    except ValueError:
        return _finite(text)


def _finite(text: str) -> float:
    value = float(text)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(text)
    return value


_WHOLE = "a whole number"
_SECONDS = "a number of seconds"

FLAGS: Final[tuple[Flag, ...]] = (
    # ------------------------------------------------------------ how many processes
    Flag(
        "--nnodes", "Number of nodes, or the smallest and largest number that will do.", "size",
        kind=str, default="1:1", metavar="N|MIN:MAX",
    ),
    Flag(
        "--nproc-per-node", "Ranks on this node; nodes may differ. gpu, xpu, cpu: as many as there "
        "are; auto: as many as there are accelerators, else cores.", "size",
        kind=str, default="1", metavar="N|auto|cpu|gpu|xpu",
    ),
    Flag(
        "--standalone", "One node, with a master of its own on a free port.", "size",
    ),
    Flag(
        "--node-unit", "Rounds have a multiple of this many nodes; the rest wait as spares.",
        "size", kind=int, wants=_WHOLE, default=1, metavar="N", origin=DLROVER,
    ),
    Flag(
        "--auto-config", "Take the number of nodes from $NODE_NUM and one rank for every GPU.",
        "size", origin=DLROVER,
    ),
    # ------------------------------------------------------------ where the nodes meet
    Flag(
        "--rdzv-backend", "How nodes find the master: static (--master-addr and --master-port), or "
        "c10d (--rdzv-endpoint); a plug-in of the group torchrun.handlers is left to torchrun.",
        "rdzv", kind=str, default="static", metavar="WORD",
    ),
    Flag(
        "--rdzv-endpoint", "Where the master is; the node that has this address starts it. The "
        "port is 29400 where none is given. file:///PATH: a file in a folder that all nodes share, "
        "by which they find each other.", "rdzv", kind=str, default="", metavar="HOST[:PORT]",
    ),
    Flag(
        "--rdzv-id", "Name of the job, the same on all its nodes.", "rdzv",
        kind=str, default="none", metavar="ID",
    ),
    Flag(
        "--rdzv-conf", "Times of the rendezvous in seconds: join_timeout, last_call_timeout, "
        "heartbeat_timeout, master_lost_timeout, grow_cooldown, probe_timeout, straggler_time; "
        "is_host=0|1; node_unit=N.", "rdzv",
        kind=str, default="", metavar="KEY=VALUE,...",
    ),
    Flag(
        "--master-addr", "Address of the node with rank 0 (static only).", "rdzv",
        kind=str, default="127.0.0.1", metavar="HOST",
    ),
    Flag(
        "--master-port", "Port there; the ranks see it as MASTER_PORT (static only; 29500).",
        "rdzv", kind=int, wants=_WHOLE, metavar="PORT",
    ),
    Flag(
        "--master-store", "Keep the job's record and who leads in etcd (etcd://HOST:PORT,...): "
        "another node takes over when the master's host dies. Needs --rdzv-id.", "rdzv",
        kind=str, default="", metavar="URL", origin=OURS,
    ),
    Flag(
        "--srun", "In a Slurm batch script or salloc: start this command again by srun, once on "
        "each node of the job.", "rdzv", env="", origin=OURS,
    ),
    # ------------------------------------------------------------ who may join
    Flag(
        "--token-file", "File with the job's secret, the same on all nodes (or $ELASTICRUN_TOKEN); "
        "it never crosses the network.", "trust", kind=str, default="", metavar="FILE", origin=OURS,
    ),
    Flag(
        "--tls-cert", "Certificate (PEM) of this node, for the master's TLS and as a client.",
        "trust", kind=str, default="", metavar="FILE", origin=OURS,
    ),
    Flag(
        "--tls-key", "Private key (PEM) of --tls-cert.", "trust", kind=str, default="",
        metavar="FILE", origin=OURS,
    ),
    Flag(
        "--tls-ca", "Certificates (PEM) that a peer's must be signed by.", "trust", kind=str,
        default="", metavar="FILE", origin=OURS,
    ),
    # ------------------------------------------------------------ this node
    Flag(
        "--node-rank", "Rank of this node; a wish where --rdzv-backend is not static.", "node",
        kind=int, wants=_WHOLE, default=0, metavar="N",
    ),
    Flag(
        "--local-addr", "Address of this node for the others, where the one that its connection "
        "to the master uses is the wrong one.", "node", kind=str, metavar="HOST",
    ),
    Flag(
        "--node-id", "Name by which the master knows this node over its lives, where host and slot "
        "will not do.", "node", kind=str, default="", metavar="NAME", origin=OURS,
    ),
    Flag(
        "--role", "Role of the ranks: ROLE_NAME, and the prefix of their lines.", "node",
        kind=str, default="default", metavar="NAME",
    ),
    # ------------------------------------------------------------ the program
    Flag("--module", "The script is a module, as for python -m.", "program", short="-m"),
    Flag("--no-python", "The script is a program of its own and is run as it is.", "program"),
    Flag(
        "--run-path", "Run the script by runpy.run_path in a child of multiprocessing.", "program",
    ),
    Flag(
        "--start-method", "How multiprocessing starts ranks whose program is a function or "
        "--run-path; scripts are not concerned.", "program", kind=str, default="spawn",
        choices=("spawn", "fork", "forkserver"),
    ),
    Flag(
        "--launch", "How scripts are started: forked from a process that has torch ready, exec'd, "
        "or forked unless that cannot be trusted.", "program", kind=str, default="auto",
        choices=("auto", "fork", "exec"), origin=OURS,
    ),
    Flag(
        "--preload", "Modules to have ready beside torch. What the first life of the ranks has "
        "imported is made ready by itself, in the background; 'learn': at once; 'off': never.",
        "program", kind=str, default="", metavar="MODULE,...|learn|off", origin=OURS,
    ),
    Flag(
        "--warm", "Leave a process behind that has torch imported, for later jobs to begin from "
        "(elasticrun warm).", "program", origin=OURS,
    ),
    # ------------------------------------------------------------ restarting and stopping
    Flag(
        "--max-restarts", "How often the job's ranks are restarted after a failure.", "restart",
        kind=int, wants=_WHOLE, default=0, metavar="N",
    ),
    Flag(
        "--restart-window", "Count only the failures of this many seconds; 0: all of the job.",
        "restart", kind=seconds, wants=_SECONDS, default=config.RESTART_WINDOW, metavar="SECONDS",
        origin=OURS,
    ),
    Flag(
        "--restart-backoff", "Longest wait before ranks that die at once are restarted; 0: none.",
        "restart", kind=seconds, wants=_SECONDS, default=config.RESTART_BACKOFF, metavar="SECONDS",
        origin=OURS,
    ),
    Flag(
        "--restart-grace", "Time between SIGTERM and SIGKILL when ranks are restarted; the "
        "shutdown timeout where none is given.", "restart", kind=seconds, wants=_SECONDS,
        metavar="SECONDS", origin=OURS,
    ),
    Flag(
        "--shutdown-timeout", "Time between SIGTERM and SIGKILL "
        "($TORCH_ELASTIC_SHUTDOWN_TIMEOUT, 30).", "restart", kind=seconds, wants=_SECONDS,
        metavar="SECONDS",
    ),
    Flag(
        "--exit-barrier-timeout", "How long a node whose ranks are done waits for the others "
        "($TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT); as long as the job runs where none is given.",
        "restart", kind=seconds, wants=_SECONDS, metavar="SECONDS", origin=NEWER,
    ),
    Flag(
        "--departure-grace", "Time from such a signal until a node leaves, in which its ranks save "
        "a step, if they have a Checkpointer; 0: none.", "restart", kind=seconds, wants=_SECONDS,
        default=config.DEPARTURE_GRACE, metavar="SECONDS", origin=OURS,
    ),
    Flag(
        "--signals-to-handle", "Signals that end the job: passed on to the ranks, which are "
        "killed after the shutdown timeout.", "restart", kind=str,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", metavar="NAME,...",
    ),
    Flag(
        "--monitor-interval", "Accepted; elasticrun waits for events and does not poll.", "restart",
        kind=float, wants="a number", default=0.1, metavar="SECONDS",
    ),
    Flag(
        "--grow", "When nodes that come late are let in: auto waits for a good moment, now "
        "restarts the ranks at once.", "restart", kind=str, default="auto",
        choices=("auto", "now"), origin=OURS,
    ),
    Flag(
        "--exit-codes", "torchrun: 1 for every failure of ranks; scheduler: 93 (do not try again) "
        "where another try cannot help, as the script itself has failed or is missing.", "restart",
        kind=str, default="torchrun", choices=("torchrun", "scheduler"), origin=OURS,
    ),
    # ------------------------------------------------------------ output
    Flag(
        "--log-dir", "Folder for log files; /dev/null for none at all.", "output",
        kind=str, metavar="DIR",
    ),
    Flag(
        "--redirects", "Streams that go to files: 0 none, 1 stdout, 2 stderr, 3 both, or by local "
        "rank (0:1,12:3).", "output", kind=str, default="0", metavar="STREAMS", short="-r",
    ),
    Flag(
        "--tee", "Streams that go to files and to the console (as --redirects).", "output",
        kind=str, default="0", metavar="STREAMS", short="-t",
    ),
    Flag(
        "--local-ranks-filter", "Local ranks whose output the console shows; all where empty.",
        "output", kind=str, default="", metavar="N,...",
    ),
    Flag(
        "--duplicate-stdout-filters", "Lines of tee'd stdout with one of these texts also go to "
        "filtered_stdout.log; two commas stand for one.", "output", kind=comma_separated,
        default=(), metavar="TEXT,...",
    ),
    Flag(
        "--duplicate-stderr-filters", "The same for stderr and filtered_stderr.log.", "output",
        kind=comma_separated, default=(), metavar="TEXT,...",
    ),
    Flag(
        "--log-line-prefix-template", "Prefix of console lines, with ${role_name}, ${local_rank}, "
        "${rank} and ${hostname} ($TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE).", "output",
        kind=str, default="", metavar="TEXT", origin=NEWER,
    ),
    Flag(
        "--logs-specs", "Plug-in of the group torchrun.logs_specs that says where output goes.",
        "output", kind=str, metavar="NAME", env="",
    ),
    Flag(
        "--event-log-handler", "Where events are logged: null, console, dynamic_rendezvous.",
        "output", kind=str, default="null", metavar="NAME",
    ),
    # ------------------------------------------------------------ devices and cores
    Flag(
        "--numa-binding", "Bind each rank to cores near its GPU.", "place", kind=str, env="",
        choices=("node", "socket", "exclusive", "core-complex"),
    ),
    Flag(
        "--virtual-local-rank", "Every rank sees LOCAL_RANK=0 and its own GPU as the only one.",
        "place",
    ),
    Flag(
        "--numa-affinity", "Bind each rank to the cores of its GPU's NUMA node.", "place",
        origin=DLROVER,
    ),
    Flag(
        "--membind-policy", "Memory policy with --numa-affinity: bind, preferred, or none.",
        "place", kind=str, default="preferred", metavar="POLICY", origin=DLROVER,
    ),
    # ------------------------------------------------------------ node health
    Flag(
        "--network-check", "Probe every node and its links before its first round; a node that "
        "fails is excluded and ends with exit code 75.", "health", origin=DLROVER,
    ),
    Flag(
        "--comm-perf-test", "Measure one all_reduce over all good nodes before training.",
        "health", origin=DLROVER,
    ),
    Flag(
        "--comm-perf-threshold", "Bus bandwidth in GB/s that --comm-perf-test must reach, or the "
        "job ends; 0: none.", "health", kind=_finite, wants="a number of GB/s", default=0.0,
        metavar="GB/S", origin=OURS,
    ),
    Flag(
        "--precheck", "1: --network-check, and what elasticrun doctor calls failed ends this node "
        "with exit code 75; 2: --comm-perf-test as well.", "health", kind=int, wants=_WHOLE,
        default=0, metavar="{0,1,2}", origin=DLROVER,
    ),
    Flag(
        "--exclude-straggler", "Exclude slow nodes, found by the network check or while training; "
        "never below the smallest number of nodes.", "health", origin=DLROVER,
    ),
    Flag(
        "--straggler-ratio", "A node is slow from this multiple of the others' median time on.",
        "health", kind=_finite, wants="a number", default=config.SLOW_RATIO, metavar="RATIO",
        origin=OURS,
    ),
    Flag(
        "--exclude-for", "How long an excluded node is refused; then it is probed anew.", "health",
        kind=seconds, wants=_SECONDS, default=config.EXCLUDE_FOR, metavar="SECONDS", origin=OURS,
    ),
    Flag(
        "--quarantine", "So many excluded nodes at once stay parked, without ranks, so that the "
        "scheduler cannot give their machines to replacements; they end with the job, or after "
        "--exclude-for.", "health", kind=int, wants=_WHOLE, default=0, metavar="NODES",
        origin=OURS,
    ),
    Flag(
        "--accelerator", "What probes use: nvidia, ascend or cpu (or dlrover-run's nvidia.com/gpu, "
        "ascend-npu); found by itself where none is given.", "health", kind=str, default="",
        metavar="NAME", origin=DLROVER,
    ),
    # ------------------------------------------------------------ snapshots
    Flag(
        "--save-at-breakpoint", "After a failure, write the newest whole snapshot out as a "
        "checkpoint, in the background; before the job ends in one too.", "saves", origin=DLROVER,
    ),
    Flag(
        "--save-limit", "Longest time for writing one checkpoint; then the attempt is given up.",
        "saves", kind=seconds, wants=_SECONDS, default=config.SAVE_LIMIT, metavar="SECONDS",
        origin=OURS,
    ),
    Flag(
        "--restore-step", "Go on from this step and no other, from memory or storage; for one "
        "start: take it off again.", "saves", kind=int, wants=_WHOLE, metavar="STEP", origin=OURS,
    ),
    # ------------------------------------------------------------ elasticrun itself
    Flag(
        "--status-port", "Port of the job's status page; 0: one that is free.", "own", kind=int,
        wants=_WHOLE, default=0, metavar="PORT", origin=OURS,
    ),
    Flag("--dry-run", "Print what would run, and where each setting comes from.", "own", env="",
         origin=OURS),
    Flag("--version", "Print the version.", "own", env="", origin=OURS),
    Flag(
        "--print-completion", "Print the completion script of a shell (needs shtab).", "own",
        kind=str, choices=("bash", "zsh", "tcsh"), env="", origin=NEWER,
    ),
    # ------------------------------------------------------------ accepted from dlrover-run
    Flag("--auto-tunning", "Tune the data loader (nothing yet).", "dlrover", origin=DLROVER),
    Flag(
        "--training-port", "First port of Ascend's collectives (nothing yet).", "dlrover",
        kind=int, wants=_WHOLE, default=60000, metavar="PORT", origin=DLROVER,
    ),
    Flag(
        "--ucp-device-type", "Device of universal checkpoints (nothing yet).", "dlrover",
        kind=str, default="cpu", metavar="NAME", origin=DLROVER,
    ),
)  # fmt: skip

NOTHING_YET: Final = ("auto_tunning", "training_port", "ucp_device_type")
"""Flags of dlrover-run that are accepted and have no effect in this version."""
