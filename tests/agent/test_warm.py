"""What a warm process or a guard says, as an agent reads it."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.agent import warm
from elasticrun.agent.warm import receive, socket_path
from elasticrun.host.log import NOTICE, logger
from elasticrun.wire import frames, spawning


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_a_word_in_pieces_is_one_word(pieces: int) -> None:
    said = spawning.Declined("its umask differs")
    data = frames.encode(said)
    size = -(-len(data) // pieces)
    # of such a pair each piece is received by itself
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for begin in range(0, len(data), size):
            theirs.send(data[begin : begin + size])
        assert receive(ours) == said


@pytest.mark.parametrize("before", [b"", b"\0\0"])
def test_who_ends_in_the_middle_of_a_word_has_said_none(before: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(before)
        theirs.close()
        with pytest.raises(ConnectionResetError, match="it ended"):
            receive(ours)


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ("", "1", "OMP_NUM_THREADS not set here, 1 in process {}; `elasticrun warm --one-rank`"),
        ("1", "", "OMP_NUM_THREADS 1 here, not set in process {}; `elasticrun warm`"),
        ("2", "1", "OMP_NUM_THREADS 2 here, 1 in process {}; `elasticrun warm`"),
    ],
)
def test_one_for_another_number_of_threads_is_not_used(
    tmp_path: Path, caplog, monkeypatch: pytest.MonkeyPatch, here: str, there: str, words: str
) -> None:
    (tmp_path / "elasticrun").mkdir(mode=0o700)
    monkeypatch.setattr(logger, "propagate", True)
    ours, theirs = (
        {"XDG_RUNTIME_DIR": str(tmp_path), **({"OMP_NUM_THREADS": threads} if threads else {})}
        for threads in (here, there)
    )
    listens = (
        "import os, socket, sys\n"
        "os.chdir(sys.argv[1])\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "listener.bind(sys.argv[2]); listener.listen()\n"
        "print(flush=True); sys.stdin.read()\n"
    )
    place = socket_path(theirs)
    caplog.set_level(logging.INFO, "elasticrun")
    warm._log_not_used.cache_clear()
    with subprocess.Popen(
        [sys.executable, "-c", listens, str(place.parent), place.name],
        env=theirs, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline()
        assert warm.fork_server(ours, ()) is None
        other.stdin.close()
    (said,) = [(one.levelno, one.message) for one in caplog.records]
    told = f"the warm process is not used: {words.format(other.pid)} here starts one for such jobs"
    assert said == (NOTICE, told)


@pytest.mark.parametrize(("named", "level"), [("", NOTICE), ("ELASTICRUN_WARM_SERVER", 20)])
def test_that_one_is_not_used_is_said_by_default(
    tmp_path: Path, caplog, monkeypatch: pytest.MonkeyPatch, named: str, level: int
) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / "elasticrun").mkdir(mode=0o700)
    place = socket_path(env)
    env |= {named: str(place)} if named else {}
    caplog.set_level(logging.INFO, "elasticrun")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(warm, "_ask", lambda *_: spawning.Declined("umask 0077 here"))
    monkeypatch.chdir(place.parent)  # a socket's path has 107 bytes at most
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place.name)
        listener.listen()
        assert warm.fork_server(env, ()) is None
    place.unlink()
    assert warm.fork_server(env, ()) is None
    said = [(one.levelno, one.message.partition(";")[0]) for one in caplog.records]
    gone = [(NOTICE, f"no warm process at {place}")] if named else []
    assert said == [(level, "the warm process is not used: umask 0077 here"), *gone]
