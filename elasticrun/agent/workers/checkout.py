"""The code of the ranks from a git repository: which commit a name means, and one checkout of it a
node, in WORKDIR/code/REPO.

git does it, with the user's own configuration; nothing asks anybody for a password. User name and
password come from the environment and reach git by two files in memory that only its own processes
have open: they are in no argument, no variable and no file, and no helper of the user stores them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from elasticrun.system.processes import die_with_parent
from elasticrun.wire.env import GIT_PASSWORDS, GIT_USERNAMES

GIT_LIMIT: Final = 600.0
"""Seconds for one git command, and for another agent on this node that is at it."""
LOOK_LIMIT: Final = 60.0
"""Seconds for asking which commit a name means."""

_COMMIT: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?\Z")
_AUTHORITY: Final = re.compile(r"[a-z+]+://[^/]*|[^/@:]+@[^/:]+:|")
_REFUSED: Final = ("Authentication failed", "could not read Username", "could not read Password")


class GitError(Exception):
    """The code cannot be had; one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class GitSource:
    """`URL[@REF]`. ref: a branch, a tag or a whole commit, "" for the default branch."""

    url: str
    ref: str = ""

    def __str__(self) -> str:
        return f"{self.url}@{self.ref}" if self.ref else self.url

    @property
    def is_pinned(self) -> bool:
        return bool(_COMMIT.match(self.ref))

    @property
    def repository(self) -> str:
        """The last part of the URL, as `git clone` names its folder."""
        return re.split(r"[/:]", self.url.rstrip("/"))[-1].removesuffix(".git")


def parsed(text: str) -> GitSource:
    """What `--git` says. GitError."""
    found = _AUTHORITY.match(text)
    at = text.find("@", found.end() if found else 0)
    url, ref = (text, "") if at < 0 else (text[:at], text[at + 1 :])
    source = GitSource(url, ref)
    if url.startswith("-") or ref.startswith("-") or not source.repository.strip("."):
        raise GitError(f"--git={text}: write URL, or URL@BRANCH, URL@TAG or URL@COMMIT")
    if re.match(r"[a-z+]+://[^/@]*:[^/@]*@", text):
        raise GitError(
            "--git: a password in the URL can be read by everybody on this machine: leave it out, "
            f"and set {GIT_USERNAMES[1]} and {GIT_PASSWORDS[1]}"
        )
    return source


def pinned(source: GitSource, environ: Mapping[str, str]) -> GitSource:
    """The same with the commit that its name means now. GitError."""
    if source.is_pinned:
        return source
    name = source.ref or "HEAD"
    wanted = [f"refs/tags/{name}^{{}}", f"refs/tags/{name}", f"refs/heads/{name}", name]
    told = _git(source, environ, "ls-remote", "--", source.url, *wanted, limit=LOOK_LIMIT)
    found = {ref: commit for commit, _, ref in (row.partition("\t") for row in told.splitlines())}
    commit = next((found[ref] for ref in wanted if ref in found), "")
    if not commit:
        hint = "; write all 40 digits of a commit" if re.fullmatch("[0-9a-f]{7,39}", name) else ""
        raise GitError(f"--git={source}: {source.url} has no branch and no tag {name}{hint}")
    return replace(source, ref=commit)


def check_out(source: GitSource, workdir: Path, environ: Mapping[str, str]) -> Path:
    """The folder in which this commit is checked out, made where it is not there. GitError."""
    folder = workdir / "code" / source.repository
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f".{folder.name}.lock")):
            _put(source, folder, environ)
    except OSError as wrong:
        raise GitError(f"--git: {folder}: {wrong.strerror}") from None
    return folder


def _put(source: GitSource, folder: Path, environ: Mapping[str, str]) -> None:
    if not folder.exists():
        part = folder.with_name(f".{folder.name}.{os.uname().nodename}.{os.getpid()}")
        try:
            part.mkdir()
            _git(source, environ, "init", "-q", cwd=part)
            _git(source, environ, "remote", "add", "origin", source.url, cwd=part)
            _fetch(source, part, environ)
            with contextlib.suppress(OSError):  # a node that shares the folder was faster
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    if not (folder / ".git").exists():
        raise GitError(f"--git: {folder} is there and is no checkout: move it away")
    origin = _git(source, environ, "remote", "get-url", "origin", cwd=folder).strip()
    if origin != source.url:
        raise GitError(f"--git: {folder} is a checkout of {origin}: move it away")
    if _git(source, environ, "rev-parse", "HEAD", cwd=folder).strip() == source.ref:
        return
    if _git(source, environ, "status", "--porcelain", "--untracked-files=no", cwd=folder):
        raise GitError(
            f"--git: {folder} has changes that another commit would overwrite: commit or undo them"
        )
    _fetch(source, folder, environ)


def _fetch(source: GitSource, folder: Path, environ: Mapping[str, str]) -> None:
    """This commit alone where the server gives single ones, else all there is."""
    try:
        _git(source, environ, "fetch", "-q", "--depth=1", "origin", source.ref, cwd=folder)
    except GitError:
        heads = "+refs/heads/*:refs/remotes/origin/*"
        _git(source, environ, "fetch", "-q", "--tags", "origin", heads, cwd=folder)
    try:
        _git(source, environ, "cat-file", "-e", f"{source.ref}^{{commit}}", cwd=folder)
    except GitError:
        raise GitError(f"--git={source}: {source.url} has no such commit") from None
    _git(source, environ, "checkout", "-q", "--detach", source.ref, cwd=folder)
    if (folder / ".gitmodules").exists():
        words = ("submodule", "update", "-q", "--init", "--recursive", "--depth=1")
        _git(source, environ, *words, cwd=folder)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other agent of this node is at the same folder. GitError where one is for too long."""
    until = time.monotonic() + GIT_LIMIT
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise GitError(f"--git: another process has held {path} for too long") from None
                time.sleep(0.1)
            except OSError:  # a file system without locks: the rename decides
                break
        yield


def _git(
    source: GitSource,
    environ: Mapping[str, str],
    *words: str,
    cwd: Path | None = None,
    limit: float = GIT_LIMIT,
) -> str:
    """What git prints. GitError."""
    secrets = [next((environ[name] for name in names if environ.get(name)), "")
               for names in (GIT_USERNAMES, GIT_PASSWORDS)]  # fmt: skip
    hidden = (*GIT_USERNAMES, *GIT_PASSWORDS, "ELASTICRUN_TOKEN")
    variables = {name: value for name, value in environ.items() if name not in hidden}
    variables |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    variables.setdefault("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")
    options = ["-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60"]
    with contextlib.ExitStack() as files:
        fds: tuple[int, ...] = ()
        if any(secrets):
            fds = tuple(files.enter_context(_in_memory(text)) for text in secrets)
            asking = "#!/bin/sh\ncase $1 in Username*) cat /dev/fd/%d;; *) cat /dev/fd/%d;; esac\n"
            script = files.enter_context(_in_memory(asking % fds))
            fds = (*fds, script)
            variables["GIT_ASKPASS"] = f"/dev/fd/{script}"
            options += ["-c", "credential.helper="]
        try:
            done = subprocess.run(
                ["git", *options, *words], cwd=cwd, env=variables, pass_fds=fds,
                stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )  # fmt: skip
        except FileNotFoundError:
            raise GitError("--git: there is no git on this machine: install it") from None
        except subprocess.TimeoutExpired:
            raise GitError(
                f"--git={source}: git {words[0]} was not done within {limit:g} s"
            ) from None
    if done.returncode:
        raise GitError(_why(source, done.stderr.decode(errors="replace"), secrets))
    return done.stdout.decode(errors="replace")


def _why(source: GitSource, said: str, secrets: list[str]) -> str:
    lines = [line for line in said.splitlines() if line.strip()] or ["git has failed"]
    last = next((line for line in lines if line.startswith("fatal:")), lines[-1])[:300]
    for secret in filter(None, secrets):
        last = last.replace(secret, "***")
    what = f"--git={source}: {last.removeprefix('fatal: ').rstrip('.')}"
    if any(word in last for word in _REFUSED):
        both = f"{GIT_USERNAMES[1]} and {GIT_PASSWORDS[1]}"
        what += f"; {'look at' if any(secrets) else 'set'} {both} where the job is started"
    return what


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[int]:
    """A file without a name; closed for writing, or the kernel would not run it."""
    written = os.memfd_create("elasticrun")
    try:
        os.fchmod(written, 0o700)
        os.write(written, text.encode())
        fd = os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(written)
    try:
        yield fd
    finally:
        os.close(fd)
