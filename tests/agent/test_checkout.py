"""--git: a real git server over HTTP that wants a password, and jobs whose code comes from it."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from elasticrun.agent.workers import checkout
from elasticrun.agent.workers.checkout import GitError, GitSource, parse_source, pin_source
from tests import needs
from tests.harness import LIMIT, World, await_true, free_port, ran, until_file

USER, SECRET = "me", f"a-secret-for-git-{os.getpid()}-0123456789"  # of this test process alone


def shown(secret: str) -> list[str]:
    """The processes of this machine whose words or variables have it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                if secret.encode() in (process / name).read_bytes():
                    found.append(f"{name}: {(process / 'cmdline').read_bytes()!r}")
            except OSError:
                pass
    return found


def check_out(source: GitSource, work: Path, environ: dict[str, str]) -> Path:
    """As by an agent that has ended since."""
    os.close(checkout.check_out(source, work, environ))
    return source.folder(work)


def has_secret(pid: int) -> bool:
    """Whether the variables that it was started with still show the password."""
    return SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes()


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


class Origin:
    """A repository `train` with two commits, served by git's own CGI program."""

    def __init__(self, folder: Path) -> None:
        self.clones = 0
        self.asked = threading.Event()
        self.answers = threading.Event()  # unset, whoever asks has to wait
        self.answers.set()
        self.seen: list[str] = []
        source = folder / "train"
        (source / "lib").mkdir(parents=True)
        (source / "lib/word.py").write_text("WORD = 'first'\n")
        (source / "main.py").write_text(
            "import os, sys\nfrom lib.word import WORD\n"
            "print(WORD, os.path.exists('main.py'), sys.argv[1:],\n"
            "      [n for n in os.environ if 'GIT_SYNC' in n], flush=True)\n"
        )
        git(source, "init", "-q")
        git(source, "add", ".")
        git(source, "commit", "-qm", "one")
        git(source, "tag", "-am", "one", "v1")
        (source / "lib/word.py").write_text("WORD = 'second'\n")
        git(source, "commit", "-qam", "two")
        self.first, self.second = (
            git(source, "rev-parse", "HEAD~1"),
            git(source, "rev-parse", "HEAD"),
        )
        self.backend = git(source, "--exec-path") + "/git-http-backend"
        self.root = str(folder)
        origin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                origin.answer(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/train"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, asked: BaseHTTPRequestHandler) -> None:
        """At each request of git's look who shows the password at this moment."""
        self.asked.set()
        self.answers.wait(LIMIT)
        self.seen += shown(SECRET)
        right = base64.b64encode(f"{USER}:{SECRET}".encode()).decode()
        body = asked.rfile.read(int(asked.headers.get("Content-Length", 0)))
        if asked.headers.get("Authorization") != f"Basic {right}":
            asked.send_response(401)
            asked.send_header("WWW-Authenticate", 'Basic realm="git"')
            asked.end_headers()
            return
        path, _, query = asked.path.partition("?")
        self.clones += (asked.command == "POST" and b"want " in body) or b"fetch" in body
        done = subprocess.run(
            [self.backend], input=body, capture_output=True, check=False,
            env={**os.environ, "GIT_PROJECT_ROOT": self.root, "GIT_HTTP_EXPORT_ALL": "1",
                 "PATH_INFO": path, "QUERY_STRING": query, "REQUEST_METHOD": asked.command,
                 "CONTENT_TYPE": asked.headers.get("Content-Type", ""),
                 "HTTP_CONTENT_ENCODING": asked.headers.get("Content-Encoding", ""),
                 "HTTP_GIT_PROTOCOL": asked.headers.get("Git-Protocol", "")},
        )  # fmt: skip
        head, _, rest = done.stdout.partition(b"\r\n\r\n")
        asked.send_response(200)
        for line in head.decode().splitlines():
            name, _, value = line.partition(": ")
            if name != "Status":
                asked.send_header(name, value)
        asked.end_headers()
        asked.wfile.write(rest)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    needs.program("git", package="git")
    made = Origin(tmp_path / "served")
    yield made
    made.close()


def variables(password: str = SECRET) -> dict[str, str]:
    return {**os.environ, "GIT_SYNC_USERNAME": USER, "GIT_SYNC_PASSWORD": password}


@pytest.mark.parametrize(
    ("text", "url", "ref", "repository"),
    [
        ("https://host/org/repo.git@v1", "https://host/org/repo.git", "v1", "repo"),
        ("https://me@host/org/repo", "https://me@host/org/repo", "", "repo"),
        ("git@host:org/repo.git@feature/x", "git@host:org/repo.git", "feature/x", "repo"),
        ("ssh://git@host:22/repo/@main", "ssh://git@host:22/repo/", "main", "repo"),
        ("/srv/repo@main", "/srv/repo", "main", "repo"),
        ("some/../repo", f"{os.getcwd()}/repo", "", "repo"),
        (f"h:r@{'AB' * 20}", "h:r", "ab" * 20, "r"),
    ],
)
def test_what_git_says(text: str, url: str, ref: str, repository: str) -> None:
    assert parse_source(text) == GitSource(url, ref)
    assert parse_source(text).repository == repository


@pytest.mark.parametrize(
    "text",
    [
        "-x",
        "https://h/r@-x",
        "https://me:pass@h/r",
        "/",
        "http::https://me:pass@h/r",
        "https://ghp_pass@h/r",
    ],
)
def test_what_it_cannot_say(text: str) -> None:
    with pytest.raises(GitError, match="--git") as told:
        parse_source(text)
    assert "pass@" not in str(told.value)


@pytest.mark.slow
def test_a_commit_for_a_name_and_a_checkout_of_it(origin: Origin, tmp_path: Path) -> None:
    """A tag, the default branch, a commit; the folder changes its commit, not what is edited."""
    environ = variables()
    first, second = (pin_source(parse_source(origin.url + name), environ) for name in ("@v1", ""))
    assert (first.ref, second.ref) == (origin.first, origin.second)
    assert pin_source(first, {}) is first  # a commit needs no server
    (tmp_path / f"work/code/.train.{os.uname().nodename}.1/half").mkdir(parents=True)
    folder = check_out(first, tmp_path / "work", environ)
    assert folder == tmp_path / "work/code/train"
    assert sorted(os.listdir(folder.parent)) == [".train.lock", ".train.used", "train"]
    assert "first" in (folder / "lib/word.py").read_text()
    (folder / "result.txt").write_text("mine")
    check_out(second, tmp_path / "work", environ)
    assert "second" in (folder / "lib/word.py").read_text()
    assert (folder / "result.txt").read_text() == "mine"
    in_use = checkout.check_out(second, tmp_path / "work", {})  # nothing has to be fetched
    with pytest.raises(GitError, match=r"a job runs from .* give this one its own"):
        check_out(first, tmp_path / "work", environ)
    os.close(in_use)
    (folder / "main.py").write_text("edited")
    check_out(second, tmp_path / "work", {})
    with pytest.raises(GitError, match="has changes that another commit would overwrite"):
        check_out(first, tmp_path / "work", environ)
    assert not origin.seen


@pytest.mark.slow
def test_a_submodule_elsewhere_hears_no_password(origin: Origin, tmp_path: Path) -> None:
    """And what has failed once is not taken for whole afterwards."""
    source, stranger = tmp_path / "served/train", Origin(tmp_path / "elsewhere")
    try:
        git(source, "checkout", "-qb", "parts")
        git(source, "update-index", "--add", "--cacheinfo", f"160000,{stranger.first},part")
        for url in (stranger.url, "../more"):
            text = f"[submodule 'part']\n path = part\n url = {url}\n".replace("'", '"')
            (source / ".gitmodules").write_text(text)
            git(source, "add", ".gitmodules")
            git(source, "commit", "-qm", url)
        wrong, right = git(source, "rev-parse", "HEAD~1"), git(source, "rev-parse", "HEAD")
        (tmp_path / "elsewhere/train").rename(tmp_path / "served/more")
        check_out(GitSource(origin.url, origin.first), tmp_path, variables())
        for _ in range(2):
            with pytest.raises(GitError, match="are sent only to the URL's host"):
                check_out(GitSource(origin.url, wrong), tmp_path, variables())
    finally:
        stranger.close()
    (tmp_path / "code/train").rename(tmp_path / "code/before")
    folder = check_out(GitSource(origin.url, right), tmp_path, variables())
    assert (folder / "part/main.py").exists()


@pytest.mark.slow
def test_variables_that_mean_another_repository(origin: Origin, tmp_path: Path) -> None:
    """As a hook of git has them: that one is left alone."""
    mine = tmp_path / "mine"
    mine.mkdir()
    git(mine, "init", "-q")
    (mine / "file").write_text("mine")
    git(mine, "add", ".")
    git(mine, "commit", "-qm", "mine")
    environ = {**variables(), "GIT_DIR": str(mine / ".git"), "GIT_WORK_TREE": str(mine)}
    check_out(pin_source(parse_source(origin.url), environ), tmp_path, environ)
    assert (mine / "file").read_text() == "mine"
    assert not git(mine, "status", "--porcelain")


@pytest.mark.slow
def test_why_there_is_no_code(origin: Origin, tmp_path: Path) -> None:
    def told(text: str, environ: dict[str, str]) -> str:
        with pytest.raises(GitError) as wrong:
            check_out(pin_source(parse_source(text), environ), tmp_path, environ)
        assert "\n" not in str(wrong.value)
        assert SECRET not in str(wrong.value)
        return str(wrong.value)

    none = {"PATH": os.environ["PATH"]}
    assert "set GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD" in told(origin.url, none)
    assert "look at GIT_SYNC_USERNAME" in told(origin.url, variables("wrong"))
    assert "has no branch and no tag nope" in told(f"{origin.url}@nope", variables())
    assert "write all 40 digits" in told(f"{origin.url}@{origin.first[:9]}", variables())
    assert "has no such commit" in told(f"{origin.url}@{'0' * 40}", variables())
    closed = f"http://127.0.0.1:{free_port()}/train"
    assert "onnect" in told(closed, variables())
    folder = check_out(GitSource(origin.url, origin.first), tmp_path, variables())
    (folder / "more.txt").write_text("mine")
    (tmp_path / "served/train/more.txt").write_text("theirs")
    git(tmp_path / "served/train", "add", ".")
    git(tmp_path / "served/train", "commit", "-qm", "three")
    assert "would be overwritten by checkout; more.txt" in told(origin.url, variables())
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    assert "is no checkout: move it away" in told(origin.url, variables())


@pytest.mark.slow
def test_two_agents_of_a_host_run_one_checkout(origin: Origin, world: World) -> None:
    """Credentials reach git and nobody else: no process shows them, no file has them, and ranks
    have no such variables."""
    work = world.scratch / "work"
    work.mkdir()
    port = free_port()
    flags = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=g",
    )
    env = {**world.environment(), "GIT_SYNC_USERNAME": USER, "GIT_SYNC_PASSWORD": SECRET}
    words = ("-m", "elasticrun", *flags, "--log-dir=logs", "--tee=3", f"--git={origin.url}@v1")
    origin.answers.clear()
    jobs = [
        world.command((os.sys.executable, *words, "main.py", "x"), env=env, cwd=work)
        for _ in range(2)
    ]
    # for as long as an agent's Python begins it has what it was given
    await_true(lambda: not any(has_secret(job.pid) for job in jobs), "agents without the password")
    origin.answers.set()
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    for job in jobs:
        assert "first True ['x'] []" in job.stdout
        assert f"at {origin.first[:12]}, in {work}/code/train" in job.stderr
        assert SECRET not in job.stdout + job.stderr
    assert not origin.seen
    assert origin.clones
    assert sorted(path.name for path in work.iterdir()) == ["code", "logs"]
    kept = [path for path in world.scratch.rglob("*") if path.is_file()]
    assert not [path for path in kept if SECRET.encode() in path.read_bytes()]
    (record,) = [path for path in kept if path.name == "job.json"]
    assert origin.first in record.read_text()
    assert f'"workdir": "{work}"' in record.read_text()


@pytest.mark.slow
def test_a_job_that_is_submitted_has_the_commit_of_that_moment(
    origin: Origin, world: World
) -> None:
    """Typed as Arena's users type it."""
    work, run = world.scratch / "work", world.scratch / "kept"
    work.mkdir()
    env = {**world.environment(), "GIT_SYNC_USERNAME": USER, "GIT_SYNC_PASSWORD": SECRET}
    flags = ("--name=g", "--gpus=0", "--workers=1", f"--working-dir={work}", f"--run-dir={run}")
    code = ("--sync-mode=git", f"--sync-source={origin.url}", "--share-memory=2Gi")
    command = f"python -u {work}/code/train/main.py --epochs 2"
    said = ran("submit", "pytorch", *flags, *code, command, env=env)
    assert said.returncode == 0, said.stderr
    assert said.stderr.startswith("elasticrun: --share-memory=2Gi has no effect: ")
    assert origin.second in (run / "job.json").read_text()
    until_file(run / "result.json", lambda text: '"succeeded"' in text)
    texts = [path.read_text() for path in run.rglob("*") if path.is_file()]
    assert any("second True ['--epochs', '2'] []" in text for text in texts)
    assert not any(SECRET in text for text in texts)
    assert not origin.seen


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_that_is_ended_while_it_fetches(
    origin: Origin, world: World, number: signal.Signals
) -> None:
    """Nothing goes on, and nothing half lies around."""
    origin.answers.clear()
    commit = f"--git={origin.url}@{origin.first}"
    words = (os.sys.executable, "-m", "elasticrun", "--standalone", commit, "main.py")
    job = world.command(words, env=world.environment(), cwd=world.scratch)
    assert origin.asked.wait(LIMIT)
    os.kill(job.pid, number)
    assert job.wait() == 128 + number
    await_true(lambda: not shown(origin.url), "end of git")
    origin.answers.set()
    assert sorted(os.listdir(world.scratch / "code")) == [".train.lock", ".train.used"]
