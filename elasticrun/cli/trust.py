"""The job's token (its secret) and its TLS files, from flags and environment."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

from elasticrun.cli.settings import FlagValues, NotHere, UsageError
from elasticrun.config import Place, Tls
from elasticrun.host.system.network import names_this_host_only
from elasticrun.wire.env import GIT_PASSWORDS, GIT_USERNAMES, SHIM

TOKEN_VARIABLE: Final = "ELASTICRUN_TOKEN"
TOKEN_FILE_VARIABLE: Final = "ELASTICRUN_TOKEN_FILE"
GIT_SECRETS: Final = (*GIT_USERNAMES, *GIT_PASSWORDS)
"""Variables that are withdrawn for --git: only git may see them."""
MAX_TOKEN: Final = 4096
"""Maximum length of a token in characters; 32 random bytes in hex have 64."""

SHORT_TOKEN: Final = 16
"""A token with fewer characters can be guessed: anyone who can connect to the master can guess
offline, because the master proves first that it knows the token."""

SHIM_ENTRIES: Final = {"PATH": "bin", "PYTHONPATH": "python"}
"""Variables with a folder of `elasticrun shim`, and that folder's name in the shim's folder."""

SHIM_USED: Final = "used"
"""The file in the shim's folder that exists once elasticrun was started below the shim."""

_withdrawn: dict[str, str] = {}


def withdraw(*names: str) -> dict[str, str]:
    """Remove the token and these variables from this process's environment, so that children do not
    inherit them and /proc/<pid>/environ does not show them; likewise a shim. Returns the
    environment including all secrets that were ever removed."""
    leave_shim()
    for name in (TOKEN_VARIABLE, *names):
        if name in os.environ:
            _withdrawn[name] = os.environ[name]
            _overwrite(name)
            del os.environ[name]
    return {**os.environ, **_withdrawn}


def leave_shim() -> None:
    """Remove `elasticrun shim` from this process, so that children and ranks are not below it."""
    folder = os.environ.pop(SHIM, "")
    if not folder:
        return
    with contextlib.suppress(OSError):  # the shim has ended
        Path(folder, SHIM_USED).touch()
    for name, entry in SHIM_ENTRIES.items():
        path = os.environ.get(name, "").split(os.pathsep)
        rest = [each for each in path if each != os.path.join(folder, entry)]
        os.environ[name] = os.pathsep.join(rest)
        if not rest:
            del os.environ[name]
    sys.path[:] = [each for each in sys.path if not str(each).startswith(folder)]


def _overwrite(name: str) -> None:
    """Overwrite a variable's value in memory, where the kernel reads it for /proc/<pid>/environ:
    `unsetenv` only drops the pointer."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    if where := libc.getenv(os.fsencode(name)):
        ctypes.memset(where, ord("*"), len(ctypes.string_at(where)))


def token(flags: FlagValues) -> str:
    """The token, "" for none: from the file of --token-file, else from the variable. Raises
    UsageError."""
    path = _file(flags, "token_file")
    if not path:
        return _checked_token(flags.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE)
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_TOKEN + 2).strip()
    except (OSError, UnicodeDecodeError) as wrong:
        why = wrong.strerror if isinstance(wrong, OSError) else "it is not text"
        raise NotHere(f"--token-file={path} cannot be read: {why}") from None
    if not text:
        raise UsageError(f"--token-file={path} is empty: write the job's secret into it")
    return _checked_token(text, f"--token-file={path}")


def _checked_token(text: str, where: str) -> str:
    if len(text) > MAX_TOKEN:
        raise UsageError(f"{where}: a secret has at most {MAX_TOKEN} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where}: a secret must be UTF-8 text") from None
    return text


def tls(flags: FlagValues) -> Tls | None:
    """The TLS files; None for plain TCP. Raises UsageError."""
    files = {name: _file(flags, f"tls_{name}") for name in ("cert", "key", "ca")}
    if not any(files.values()):
        return None
    if bool(files["cert"]) != bool(files["key"]):
        raise UsageError("--tls-cert and --tls-key belong together: give both")
    for name, path in files.items():
        if path and not Path(path).is_file():
            why = "it is not a file" if Path(path).exists() else "there is no such file"
            raise NotHere(f"--tls-{name}={path}: {why}")
    return Tls(**files)


def _file(flags: FlagValues, dest: str) -> str:
    """A path from a flag, or from its variable if the namespace is not from our parser."""
    return flags.text(dest) or flags.environ.get(f"ELASTICRUN_{dest.upper()}", "")


def notes(where: Place, most_nodes: int, secret: str, files: Tls | None) -> list[str]:
    """Notes about who can join, and who can eavesdrop; [] if nothing is wrong."""
    if where.kind == "standalone":
        return ["TLS is not used: a standalone master is on loopback only"] if files else []
    if names_this_host_only(where.host) or (where.kind == "static" and most_nodes == 1):
        return []  # the agent creates a token for the latter
    if where.kind in ("file", "open") and not secret:
        return []  # the agent creates one
    sentences = []
    mutual = files is not None and bool(files.cert and files.ca)
    if not secret and not mutual:
        sentences.append(
            "this job has no token: anyone on the network who can reach its master can join it and "
            "run code on its nodes; set ELASTICRUN_TOKEN (or --token-file) to the same secret on "
            "all "
            "nodes, for example from `openssl rand -hex 32`"
        )
    if secret and files is None:
        sentences.append(
            "this job has a token but no TLS: others on the network can read its traffic and take "
            "over its sessions; set --tls-cert, --tls-key and --tls-ca"
        )
    if 0 < len(secret) < SHORT_TOKEN:
        sentences.append(
            f"the token has {len(secret)} characters, which is short enough to guess; use "
            "`openssl rand -hex 32`"
        )
    return sentences
