"""The secret and the files of TLS: where they come from, what is said about them, where they go."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from elasticrun.cli import trust
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.resolve import Resolved, resolve
from elasticrun.cli.settings import UsageError
from elasticrun.cli.verbs.master import configure
from elasticrun.config import Tls
from tests.cli.test_resolve import machine, notes

SEVERAL = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint some.host:29400"
STRONG = "x" * 64


def made(words: str = SEVERAL, environ: Mapping[str, str] | None = None) -> Resolved:
    environ = environ or {}
    ns = get_args_parser(environ).parse_args([*words.split(), "s.py"])
    return resolve(ns, environ, machine())


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    """A folder with files of the right names."""
    for name in ("cert", "key", "ca"):
        (tmp_path / name).write_text("-----BEGIN NOTHING-----")
    return tmp_path


def flags(pem: Path, *names: str) -> str:
    return " ".join(f"--tls-{name}={pem}/{name}" for name in names)


def test_the_token_comes_from_a_file_before_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"  {STRONG}\n")
    both = {"ELASTICRUN_TOKEN": "y"}
    assert made().identity.token == ""
    assert made(environ={"ELASTICRUN_TOKEN": STRONG}).identity.token == STRONG
    assert made(f"{SEVERAL} --token-file={path}", both).identity.token == STRONG
    assert made(environ={"ELASTICRUN_TOKEN_FILE": str(path), **both}).identity.token == STRONG
    assert configure([f"--token-file={path}"], both).identity.token == STRONG
    assert configure([], both).identity.token == "y"


def test_a_token_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "noise").write_bytes(b"\xff\xfe")
    cases = {
        f"--token-file={tmp_path}/none cannot be read: No such file": f"{tmp_path}/none",
        "is empty": f"{tmp_path}/empty",
        "it is not text": f"{tmp_path}/noise",
    }
    for said, path in cases.items():
        with pytest.raises(UsageError, match=said):
            made(f"{SEVERAL} --token-file={path}")
    for wrong in ("x" * (trust.MAX_TOKEN + 1), "\udcff"):
        with pytest.raises(UsageError, match="a secret"):
            made(environ={"ELASTICRUN_TOKEN": wrong})


def test_tls_files(pem: Path) -> None:
    assert made().identity.tls is None
    all_three = Tls(f"{pem}/cert", f"{pem}/key", f"{pem}/ca")
    assert made(f"{SEVERAL} {flags(pem, 'cert', 'key', 'ca')}").identity.tls == all_three
    assert made(f"{SEVERAL} {flags(pem, 'ca')}").identity.tls == Tls(ca=f"{pem}/ca")
    environ = {f"ELASTICRUN_TLS_{name.upper()}": f"{pem}/{name}" for name in ("cert", "key", "ca")}
    assert made(environ=environ).identity.tls == all_three
    assert configure(flags(pem, "cert", "key", "ca").split(), {}).identity.tls == all_three
    with pytest.raises(UsageError, match="belong together"):
        made(f"{SEVERAL} {flags(pem, 'cert')}")
    with pytest.raises(UsageError, match="--tls-ca=/none: there is no such file"):
        made(f"{SEVERAL} --tls-ca=/none")
    with pytest.raises(UsageError, match="--tls-ca=/: it is not a file"):
        made(f"{SEVERAL} --tls-ca=/")


ANYONE = "anyone on the network who can reach its master can join"
READABLE = "others on the network can read its traffic and take over its sessions"


@pytest.mark.parametrize(
    ("words", "token", "secured", "said"),
    [
        (SEVERAL, "", "", [ANYONE]),
        ("--nnodes 2 --master-addr h", "", "", [ANYONE]),
        ("--rdzv-backend c10d --rdzv-endpoint h:1", "", "", [ANYONE]),
        (SEVERAL, STRONG, "", [READABLE]),
        (SEVERAL, "short", "", [READABLE, "the token has 5 characters"]),
        (SEVERAL, STRONG, "cert key ca", []),
        (SEVERAL, STRONG, "ca", []),
        (SEVERAL, "", "cert key ca", []),
        (SEVERAL, "", "ca", [ANYONE]),
        ("--standalone", "", "", []),
        ("", "", "", []),
        ("--master-addr h --master-port 7", "", "", []),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:1", "", "", []),
        ("--standalone", "", "ca", ["TLS is not used"]),
    ],
)
def test_one_line_for_each_thing_that_is_not_protected(
    pem: Path, words: str, token: str, secured: str, said: list[str]
) -> None:
    config = made(f"{words} {flags(pem, *secured.split())}", {"ELASTICRUN_TOKEN": token})
    told = config.notes
    assert len(told) == len(said), notes(config)
    for line, part in zip(told, said, strict=True):
        assert part in line
        assert "\n" not in line


def test_the_secret_is_not_in_what_is_printed() -> None:
    config = made(environ={"ELASTICRUN_TOKEN": STRONG})
    assert STRONG not in repr(config)
    assert STRONG not in repr(configure([], {"ELASTICRUN_TOKEN": STRONG}))
    done = subprocess.run(
        [sys.executable, "-m", "elasticrun", *SEVERAL.split(), "--dry-run", "--verbose", __file__],
        env={"ELASTICRUN_TOKEN": STRONG, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert STRONG not in done.stdout + done.stderr
    assert "token-file" in done.stdout


WITHDRAWS = """
import os, subprocess, sys
from pathlib import Path
from elasticrun.cli.trust import withdraw
secret = os.environ['COPY'][::-1]
assert secret.encode() in Path("/proc/self/environ").read_bytes()
assert withdraw()["ELASTICRUN_TOKEN"] == secret
assert "ELASTICRUN_TOKEN" not in os.environ
assert secret.encode() not in Path("/proc/self/environ").read_bytes()
assert os.environ["BESIDE"] == "kept"
child = "import os; print(sorted(os.environ))"
seen = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout
assert "ELASTICRUN_TOKEN" not in seen and "BESIDE" in seen
assert withdraw()["ELASTICRUN_TOKEN"] == secret
os.environ["ELASTICRUN_TOKEN"] = "another"
assert withdraw()["ELASTICRUN_TOKEN"] == "another"
"""


def test_the_secret_is_taken_out_of_the_environment_and_remembered() -> None:
    secret = "s3cr3t-ünd-l0ng"
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", WITHDRAWS],
        env={"ELASTICRUN_TOKEN": secret, "BESIDE": "kept", "COPY": secret[::-1]},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
