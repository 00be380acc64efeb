"""Why a launcher ended, as a cluster keeps it with its pod."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from elasticrun.core import reasons
from elasticrun.core.reasons import NoRestartsLeft, RankFailed, Said
from elasticrun.host.runs.last_word import MAX_FILE_BYTES, LastWord, read, write
from elasticrun.wire import env
from tests.harness import warm_server


def test_what_is_left_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "word"
    write(LastWord("nobody has asked for it"))
    monkeypatch.setenv(env.LAST_WORDS, str(file))
    why = NoRestartsLeft(RankFailed(1, "b", "ValueError: bad luck"), 0, 0.0, "")
    word = LastWord("rank 1 on h: ValueError: bad luck", 1, "h", reasons.code(why))
    write(word)
    assert read(file.read_text()) == word
    assert reasons.read(word.text, word.reason) == why
    write(LastWord("x" * 2 * MAX_FILE_BYTES, reason=reasons.code(why)))
    assert len(file.read_bytes()) < MAX_FILE_BYTES
    assert reasons.read(*_of(file)) == Said(read_text(file))
    for other in ("", "elasticrun: error: no such file", '{"state":"succeeded"}', "{"):
        assert read(other) is None, "a log line, a job's result, half a word"
    monkeypatch.setenv(env.LAST_WORDS, str(tmp_path / "none" / "word"))
    write(word)  # a pod that has no such file ends all the same


def read_text(file: Path) -> str:
    word = read(file.read_text())
    assert word is not None
    return word.text


def _of(file: Path) -> tuple[str, reasons.ReasonCode | None]:
    word = read(file.read_text())
    assert word is not None
    return word.text, word.reason


def launched(
    tmp_path: Path, *words: str, environ: Mapping[str, str] = os.environ
) -> tuple[int, Path]:
    file = tmp_path / "word"
    done = subprocess.run(
        [sys.executable, "-m", "elasticrun", *words],
        env={**environ, env.LAST_WORDS: str(file)},
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
        check=False,
    )
    return done.returncode, file


@pytest.mark.parametrize(
    ("words", "said"),
    [(("gone.py",), "gone.py"), (("--no-such=1", "x.py"), "--no-such"), (("--nnodes=x", "y"), "x")],
)
def test_a_command_line_that_cannot_begin_leaves_one(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    code, file = launched(tmp_path, *words)
    assert code != 0
    assert said in read_text(file)


@pytest.mark.slow
def test_a_job_that_fails_leaves_the_rank_that_failed_first(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('bad luck')\n")
    words = ("--standalone", "--nproc-per-node=1", "bad.py")
    code, file = launched(tmp_path, *words, environ={**os.environ, **warm_server()})
    assert code == 1
    word = read(file.read_text())
    assert word is not None
    assert (word.rank, word.text) == (0, f"rank 0 on {word.host}: ValueError: bad luck")
    why = reasons.failure_in(reasons.read(word.text, word.reason))
    assert why is not None
    assert (why.rank, why.what) == (0, "ValueError: bad luck")
