"""`elasticrun join HOST:PORT CODE`: makes this machine a node of a job that was started elsewhere.

The code is exchanged for the job's token and command line (`wire.auth`). Then that command runs as
if it had been typed here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from elasticrun import __version__
from elasticrun.cli import trust
from elasticrun.cli.flags import PROG, Parser, get_args_parser
from elasticrun.cli.rendezvous import without_flags
from elasticrun.cli.settings import FlagValues, NotHere, UsageError
from elasticrun.cli.verbs.masters import NoStatus, parse_endpoint
from elasticrun.config import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from elasticrun.host.system.title import set_command_line
from elasticrun.jobs.connection import JobConnection
from elasticrun.jobs.running import master_lookup
from elasticrun.wire import auth
from elasticrun.wire.auth import (
    JOIN_CODE_LIFE,
    BadCode,
    JoinAnswer,
    JoinCode,
    parse_code,
    unseal,
)
from elasticrun.wire.messages import Reply, Request
from elasticrun.wire.types import Endpoint, WireError, loads

ANSWER_LIMIT: Final = 20.0
"""Seconds for the master to answer once it is reached."""

DIAL_LIMIT: Final = 10.0
"""Seconds for which dialing is retried: a dead master is replaced within seconds."""

DIAL_PAUSE: Final = 0.5
"""Seconds between two attempts to dial."""

CLOCK_SKEW: Final = JOIN_CODE_LIFE
"""Seconds by which this machine's clock may be ahead of the master's."""

TRUST_FLAGS: Final = ("--token-file", "--tls-cert", "--tls-key", "--tls-ca")
"""Flags of the first machine that name its files. They are dropped: the answer contains the token,
and this machine's own flags name its certificates."""

TOO_OLD: Final = (
    "this join code expired long ago according to this machine's clock: print a new line with "
    "`elasticrun "
    "join --new` on the first machine, or set the clock"
)

ABOUT: Final = f"""\
Make this machine a node of a running job. The first machine prints the line to paste,
which is good for {JOIN_CODE_LIFE // 60} minutes. Script and flags come from there; FLAGS
(--nproc-per-node=4, --local-addr=10.0.0.7, --tls-ca=ca.pem) are for this machine alone.
Variables do not come from there: export here what the script needs.
With - in place of CODE, the code is read from standard input.
"""


def main(argv: Sequence[str], notify: Callable[[str], None], launch: Callable[..., int]) -> int:
    """Join, or print a new code. Returns the exit code. Raises UsageError."""
    ns = _parser().parse_args(argv)
    if ns.new:
        return _new([ns.endpoint] if ns.endpoint else [])
    if not ns.code:
        raise UsageError("join needs HOST:PORT and a code, as printed on the first machine")
    where, flags = ns.endpoint, ns.flags
    try:
        endpoint, code = parse_endpoint(where), parse_code(_code_text(ns.code))
    except (NoStatus, BadCode) as wrong:
        raise UsageError(str(wrong), EXIT_USAGE) from None
    if time.time() > code.until + CLOCK_SKEW:
        # No one needs a code that old. Someone who found it (for example in a shell's history)
        # could by now listen on that port and authenticate with it, and the joining machine would
        # run the command that it receives.
        raise UsageError(TOO_OLD, EXIT_FAILED)
    answer = _exchange(endpoint, code, flags)
    command, at = answer.command, answer.program_at
    known = any(word.startswith("--rdzv-id") for word in command[:at])
    ours = [f"--rdzv-endpoint={endpoint}", *([] if known else [f"--rdzv-id={answer.job_id}"])]
    words = [*without_flags(command[:at], (*TRUST_FLAGS, "--no-config")), *flags, *ours]
    words = ["--no-config", *words, *command[at:]]  # the job's settings, not this folder's
    _change_folder(answer, words)
    os.environ.pop(trust.TOKEN_FILE_VARIABLE, None)  # of another job; it would take precedence
    os.environ[trust.TOKEN_VARIABLE] = answer.token  # `withdraw` removes it again
    name = get_args_parser().parse_args(words).name or answer.job_id
    notify(f"joining job {name} in {os.getcwd()}: {PROG} {shlex.join(words)}")
    return launch(words)


def _code_text(word: str) -> str:
    """The code as typed, or a line of standard input for "-". Hides a typed code from `ps`."""
    if word == "-":
        return sys.stdin.readline() if sys.stdin else ""
    shown = ["-" if each == word else each for each in sys.orig_argv]
    set_command_line([os.fsencode(each) for each in shown])
    return word


def _parser() -> Parser:
    made = Parser(
        prog=f"{PROG} join",
        usage=f"{PROG} join HOST:PORT CODE [FLAGS]\n       {PROG} join --new [JOB]",
        description=ABOUT,
    )
    text = "print a new line; on the first machine, as the job's user"
    made.add_argument("--new", action="store_true", help=text)
    made.add_argument("endpoint", nargs="?", default="", metavar="HOST:PORT")
    made.add_argument("code", nargs="?", default="", metavar="CODE")
    made.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS")
    return made


def _exchange(endpoint: Endpoint, code: JoinCode, flags: Sequence[str]) -> JoinAnswer:
    """The master's answer to the code. Raises UsageError."""
    # Late import: grpc takes longer to import than everything else here together.
    from elasticrun.agent.link.answering import PortAnswer, probe
    from elasticrun.wire.rpc.channel import LinkError, ask_to_join

    variables = trust.withdraw()
    ns = get_args_parser().parse_args([*flags, "program"])
    if ns.training_script != "program":
        what = ns.training_script
        raise UsageError(f"{what}: only flags may follow the code; the script comes from the job")

    async def attempt(pem: auth.Pem | None) -> tuple[auth.AuthClient, Reply]:
        until = time.monotonic() + DIAL_LIMIT
        while True:
            guest = auth.AuthClient.with_code(code, __version__)  # a fresh nonce for each attempt
            try:
                return guest, await ask_to_join(endpoint, ANSWER_LIMIT, guest, tls=pem)
            except LinkError as error:
                if error.rejected or time.monotonic() > until:
                    raise
            await asyncio.sleep(DIAL_PAUSE)

    try:
        files = trust.tls(FlagValues(ns, variables))
        pem = None if files is None else auth.read_pem(files)
        guest, reply = asyncio.run(attempt(pem))
        if not reply.ok:
            raise UsageError(reply.reason, EXIT_FAILED)
        plain = unseal(code.secret, guest.nonces, reply.body)
        answer: JoinAnswer = loads(plain, JoinAnswer)
    except LinkError as error:
        verb, why = "refuses" if error.rejected else "does not answer", str(error)
        if not error.rejected:  # gRPC does not report why a TLS handshake failed
            found, wrong = asyncio.run(probe(endpoint, DIAL_LIMIT, files))
            why = wrong if found is PortAnswer.INSECURE else why
        raise UsageError(f"the master at {endpoint} {verb}: {why}", EXIT_FAILED) from None
    except (auth.TlsError, BadCode) as wrong:
        raise UsageError(str(wrong), EXIT_FAILED) from None
    except (WireError, ValueError) as wrong:
        raise UsageError(f"the master at {endpoint} sent {wrong}", EXIT_FAILED) from None
    return answer


def _change_folder(answer: JoinAnswer, words: Sequence[str]) -> None:
    """Change to the first machine's folder if it and the script exist here, else stay. Raises
    NotHere if the script is in neither."""
    ns = get_args_parser().parse_args(list(words))
    program = str(ns.training_script)
    is_script = not (ns.module or ns.no_python or ns.git)  # with --git it is fetched
    here, there = os.getcwd(), answer.folder
    if os.path.isdir(there) and (not is_script or os.path.exists(os.path.join(there, program))):
        os.chdir(there)
    elif is_script and not os.path.exists(program):
        where = program if os.path.isabs(program) else f"{program} in {there} or {here}"
        raise NotHere(
            f"there is no script {where}: copy the code to this machine, and join from its folder"
        )


def _new(argv: Sequence[str]) -> int:
    """Print a new join line for a job of this user."""
    return master_lookup.run(
        master_lookup.parser("join --new", "Print a new join line."), argv, _print_new
    )


def _print_new(line: JobConnection, ns: argparse.Namespace) -> int:
    code = line.reply(Request("invite")).body
    print(f"{PROG} join {line.endpoint} {code}")
    if sys.stdout.isatty():
        print(f"{PROG}: valid for {JOIN_CODE_LIFE // 60} minutes", file=sys.stderr)
    return EXIT_OK
