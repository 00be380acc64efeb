"""Checks out the ranks' code from a git repository: one checkout per node, in WORKDIR/code/REPO.

It also resolves a branch or tag to a commit. git runs with the user's own configuration, in a
session without a terminal, so nothing prompts for a password. User name and password come from the
environment. git gets them through two memory files that only its own processes have open: they
appear in no argument, variable or file, no credential helper stores them, and only the URL's host
gets them, whatever redirects and submodules say.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from elasticrun.host.system.processes import die_with_parent, memory_file
from elasticrun.wire.env import GIT_PASSWORDS, GIT_USERNAMES

GIT_LIMIT: Final = 600.0
"""Seconds for one git command, and for waiting for another agent on this node."""
RESOLVE_LIMIT: Final = 60.0
"""Seconds for resolving a name to a commit."""

MFD_EXEC: Final = 0x10
"""A flag of memfd_create that allows execution even if vm.memfd_noexec is 1; os does not define
it."""

_COMMIT: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?\Z")
_AUTHORITY: Final = re.compile(r"[a-z+]+://[^/]*|[^/@:]+@[^/:]+:|")
_SECRET: Final = re.compile(r"://([^/@]*:|gh[a-z]_|github_pat_|glpat-)[^/@]*@")
"""A password in a URL, or a token of GitHub or GitLab in place of the user."""
_HOST: Final = re.compile(r"(https?://)(?:[^/@]*@)?([^/]*)")

_REPOSITORY_VARIABLES: Final = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_PREFIX", "GIT_NAMESPACE", "GIT_SHALLOW_FILE",
)  # fmt: skip
"""Variables that point git to another repository; they are set inside a git hook."""

_ANSWER: Final = """#!/bin/sh
case $1 in *"'https://"*|*"'"{scheme}*) ;; *) exit 1;; esac
host=${{1#*://}}; host=${{host%%"'"*}}; host=${{host%%/*}}
[ "${{host##*@}}" = {host} ] || exit 1
case $1 in Username*) cat /dev/fd/{user};; *) cat /dev/fd/{password};; esac
"""
"""The program that answers git's prompts for one host. A prompt is `Username for 'https://HOST': `,
or has USER@ before the host."""


class GitError(Exception):
    """The code cannot be checked out; one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class GitSource:
    """A repository and what to check out of it, written `URL[@REF]`. `ref`: a branch, a tag or a
    full commit id; "" for the default branch."""

    url: str
    ref: str = ""

    def __str__(self) -> str:
        return f"{self.url}@{self.ref}" if self.ref else self.url

    @property
    def is_pinned(self) -> bool:
        return bool(_COMMIT.match(self.ref))

    @property
    def repository(self) -> str:
        """The last part of the URL, as in `git clone`."""
        return re.split(r"[/:]", self.url.rstrip("/"))[-1].removesuffix(".git")

    def folder(self, workdir: Path) -> Path:
        """The checkout's folder, as Arena names it."""
        return workdir / "code" / self.repository


def parse_source(text: str) -> GitSource:
    """Parse the value of `--git`. Raises GitError."""
    found = _AUTHORITY.match(text)
    at = text.find("@", found.end() if found else 0)
    url, ref = (text, "") if at < 0 else (text[:at], text[at + 1 :])
    if _SECRET.search(text):
        raise GitError(
            "--git: a password in the URL can be read by everybody on this machine: leave it out, "
            f"and set {GIT_USERNAMES[1]} and {GIT_PASSWORDS[1]}"
        )
    if not re.match(r"-|[^/]*:|\Z", url):  # a local path, and git runs in another directory
        url = os.path.abspath(os.path.expanduser(url))
    source = GitSource(url, ref.lower() if _COMMIT.match(ref.lower()) else ref)
    if url.startswith("-") or ref.startswith("-") or not source.repository.strip("."):
        raise GitError(f"--git={text}: write URL, or URL@BRANCH, URL@TAG or URL@COMMIT")
    return source


def pin_source(source: GitSource, environ: Mapping[str, str]) -> GitSource:
    """The source with its branch or tag replaced by the commit to which it refers now. Raises
    GitError."""
    if source.is_pinned:
        return source
    name = source.ref or "HEAD"
    refs = [f"refs/tags/{name}^{{}}", f"refs/tags/{name}", f"refs/heads/{name}", name]
    output = _git(source, environ, "ls-remote", "--", source.url, *refs, limit=RESOLVE_LIMIT)
    found = {ref: commit for commit, _, ref in (row.partition("\t") for row in output.splitlines())}
    commit = next((found[ref] for ref in refs if ref in found), "")
    if not commit and not source.ref:
        raise GitError(f"--git={source}: it has no commit on its default branch")
    if not commit:
        hint = "; write all 40 digits of a commit" if re.fullmatch("[0-9a-f]{7,39}", name) else ""
        raise GitError(f"--git={source}: {source.url} has no branch and no tag {name}{hint}")
    return replace(source, ref=commit)


def check_out(source: GitSource, workdir: Path, environ: Mapping[str, str]) -> int:
    """Check out this commit in its folder. While the returned file descriptor is open, no job moves
    the folder to another commit. Raises GitError."""
    folder = source.folder(workdir)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock")):
            in_use = os.open(folder.with_name(f".{folder.name}.used"), os.O_RDWR | os.O_CREAT)
            try:
                _prepare_folder(source, folder, environ, in_use)
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(in_use, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BaseException:
                os.close(in_use)
                raise
    except OSError as wrong:
        raise GitError(f"--git: {folder}: {wrong.strerror}") from None
    return in_use


def _prepare_folder(
    source: GitSource, folder: Path, environ: Mapping[str, str], in_use: int
) -> None:
    if not folder.exists():
        prefix = f".{folder.name}.{os.uname().nodename}."
        for left in folder.parent.iterdir():
            if left.name.startswith(prefix):  # left by a killed agent
                shutil.rmtree(left, ignore_errors=True)
        part = folder.with_name(f"{prefix}{os.getpid()}")
        try:
            part.mkdir()
            hashes = ["--object-format=sha256"] if len(source.ref) == 64 else []  # since git 2.29
            _git(source, environ, "init", "-q", *hashes, cwd=part)
            _git(source, environ, "remote", "add", "origin", source.url, cwd=part)
            _fetch(source, part, environ)
            with contextlib.suppress(OSError):  # another node with the same folder was faster
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    if not (folder / ".git").exists():
        raise GitError(f"--git: {folder} is there and is no checkout: move it away")
    origin = _git(source, environ, "config", "--get", "remote.origin.url", cwd=folder).strip()
    if origin.removeprefix("file://") != source.url.removeprefix("file://"):  # the same
        raise GitError(f"--git: {folder} is a checkout of {origin}: move it away")
    head = _git(source, environ, "rev-parse", "HEAD", cwd=folder).strip()
    if head == source.ref:
        _submodules(source, folder, environ)
        return
    try:
        fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise GitError(
            f"--git: a job runs from {folder} at {head[:12]}: give this one its own working "
            "directory, or end that one"
        ) from None
    except OSError:  # a file system without locks
        pass
    if _git(source, environ, "status", "--porcelain", "--untracked-files=no", cwd=folder):
        raise GitError(
            f"--git: {folder} has changes that another commit would overwrite: commit or undo them"
        )
    _fetch(source, folder, environ)


def _fetch(source: GitSource, folder: Path, environ: Mapping[str, str]) -> None:
    """Fetch only this commit if the server permits it, else everything; then check it out. Raises
    GitError."""
    try:
        _git(source, environ, "fetch", "-q", "--depth=1", "origin", source.ref, cwd=folder)
    except GitError:
        all_of_it = ["--unshallow"] if (folder / ".git/shallow").exists() else []
        heads = "+refs/heads/*:refs/remotes/origin/*"
        _git(source, environ, "fetch", "-q", *all_of_it, "--tags", "origin", heads, cwd=folder)
    try:
        _git(source, environ, "cat-file", "-e", f"{source.ref}^{{commit}}", cwd=folder)
    except GitError:
        raise GitError(f"--git={source}: {source.url} has no such commit") from None
    _git(source, environ, "checkout", "-q", "--detach", source.ref, cwd=folder)
    _submodules(source, folder, environ)


def _submodules(source: GitSource, folder: Path, environ: Mapping[str, str]) -> None:
    """Update submodules to this commit; nothing is fetched if they already match."""
    if (folder / ".gitmodules").exists():
        words = ("submodule", "update", "-q", "--init", "--recursive", "--depth=1")
        _git(source, environ, *words, cwd=folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the folder against other agents of this node. Raises GitError if another process holds
    the lock for too long."""
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
    """Run a git command and return its output. Raises GitError."""
    secrets = [next((environ[name] for name in names if environ.get(name)), "")
               for names in (GIT_USERNAMES, GIT_PASSWORDS)]  # fmt: skip
    hidden = (*GIT_USERNAMES, *GIT_PASSWORDS, "ELASTICRUN_TOKEN", *_REPOSITORY_VARIABLES)
    variables = {name: value for name, value in environ.items() if name not in hidden}
    variables |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "SSH_ASKPASS_REQUIRE": "never"}
    options = ["-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60"]
    with contextlib.ExitStack() as files:
        fds: tuple[int, ...] = ()
        if any(secrets):
            fds = tuple(_answer_files(files, source.url, secrets))
            variables["GIT_ASKPASS"] = f"/dev/fd/{fds[-1]}"
            options += ["-c", "credential.helper="]
        try:
            process = files.enter_context(subprocess.Popen(
                ["git", *options, *words], cwd=cwd, env=variables, pass_fds=fds,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            ))  # fmt: skip
            try:
                out, err = process.communicate(timeout=limit)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # with its children
                raise
        except FileNotFoundError:
            raise GitError("--git: there is no git on this machine: install it") from None
        except subprocess.TimeoutExpired:
            raise GitError(
                f"--git={source}: git {words[0]} was not done within {limit:g} s"
            ) from None
    if process.returncode:
        raise GitError(_why(source, err.decode(errors="replace"), secrets))
    return out.decode(errors="replace")


def _answer_files(files: contextlib.ExitStack, url: str, secrets: list[str]) -> Iterator[int]:
    """Memory files with the user, the password, and the program that answers git's prompts."""
    found = _HOST.match(url)
    scheme, host = map(shlex.quote, found.groups() if found else ("", ""))
    texts = (secrets[0] or "git", secrets[1])  # any user name works with a token, except ""
    user, password = (files.enter_context(_in_memory(text)) for text in texts)
    asking = _ANSWER.format(scheme=scheme, host=host, user=user, password=password)
    yield from (user, password, files.enter_context(_in_memory(asking, 0o700)))


def _why(source: GitSource, stderr: str, secrets: list[str]) -> str:
    """The sentence about a git command that failed, with git's output up to its first fatal line,
    because ssh's reason precedes that."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    noise = ("hint:", "warning:", "Cloning into", "error: unable to read askpass")
    lines = [line for line in lines if not line.startswith(noise)] or ["git has failed"]
    fatal = next((at for at, line in enumerate(lines) if line.startswith("fatal:")), len(lines))
    message = "; ".join(
        re.sub(r"^(fatal|error|remote): *|[.:]+$", "", line) for line in lines[: fatal + 1]
    )
    message = message.replace(secrets[1] or "\0", "***")[:300]
    user, password = GIT_USERNAMES[1], GIT_PASSWORDS[1]
    if any(secrets) and "could not read" in message:
        message += f"; {user} and {password} are sent only to the URL's host"
    elif "Authentication failed" in message or "could not read" in message:
        message += (
            f"; {'look at' if any(secrets) else 'set'} {user} and {password} where the job is "
        )
        message += "started"
    return f"--git={source}: {message}"


@contextlib.contextmanager
def _in_memory(text: str, mode: int = 0o600) -> Iterator[int]:
    """A memory file, open only for reading: the kernel executes no file that is open for writing.
    Raises GitError."""
    try:
        written = memory_file(
            "elasticrun", os.MFD_CLOEXEC | (MFD_EXEC if mode & stat.S_IXUSR else 0)
        )
    except OSError:  # kernels before 6.3 lack MFD_EXEC
        written = memory_file("elasticrun")
    try:
        os.fchmod(written, mode)
        os.write(written, text.encode())
        fd = os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        raise GitError(
            "--git: this host runs no program from memory (sysctl vm.memfd_noexec): leave "
            f"{GIT_USERNAMES[1]} and {GIT_PASSWORDS[1]} out, and give git a credential helper"
        ) from None
    finally:
        os.close(written)
    try:
        yield fd
    finally:
        os.close(fd)
