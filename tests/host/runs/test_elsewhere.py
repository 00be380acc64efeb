"""Folders that are shared with other PID namespaces and other hosts: a process there is neither
taken for dead nor for one of ours, and its job stays its owner's."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.agent import warm
from elasticrun.cli.verbs import warm as verb
from elasticrun.host.runs.claim import Claimed, claimed
from elasticrun.host.system.processes import INITIAL_PID_NAMESPACE, ProcessId, pid_namespace
from elasticrun.host.user_folder import FAR_LIMIT, Published, publish, published, renew, was_killed
from tests import needs
from tests.harness import LIMIT

APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

ANOTHER_HOST = (
    *("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child"),
    *("sh", "-c"),
    'hostname elsewhere; mount --bind "$0" /proc/sys/kernel/random/boot_id; exec "$@"',
)
"""A process there has another boot id (a file that comes next), host name and PID namespace."""

ELSEWHERE = dataclasses.replace(ProcessId.own(), boot="another", host="elsewhere")
UNSEEN = dataclasses.replace(ProcessId.own(), namespace=1)


@pytest.fixture
def there() -> Iterator[ProcessId]:
    """A process in a PID namespace below ours, as it writes itself down."""
    needs.namespaces("--pid", "--mount-proc")
    code = (
        "import dataclasses, json; from elasticrun.host.system.processes import ProcessId;"
        "print(json.dumps(dataclasses.asdict(ProcessId.own())), flush=True); input()"
    )
    with subprocess.Popen(
        [*APART, sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield ProcessId(**json.loads(process.stdout.readline()))
        process.kill()


def _says(place: tuple[str, ...], about: ProcessId) -> str:
    """What a process in another place believes of this one: True, False or None."""
    code = f"from elasticrun.host.system.processes import ProcessId; print({about!r}.is_alive())"
    words = [*place, sys.executable, "-c", code]
    return subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=LIMIT
    ).stdout.strip()


def test_who_is_alive_as_seen_from_here() -> None:
    me = ProcessId.own()
    assert (me.is_alive(), me.is_local) == (True, True)
    assert dataclasses.replace(me, host="the name before").is_alive()
    assert dataclasses.replace(me, started=1).is_alive() is False
    assert dataclasses.replace(me, boot="an earlier start").is_alive() is False
    assert (ELSEWHERE.is_alive(), ELSEWHERE.is_local) == (None, False)
    assert not UNSEEN.is_local
    assert dataclasses.replace(me, namespace=0).is_alive() is None


def test_a_container_is_seen_from_its_host_and_not_the_other_way_round(
    there: ProcessId, tmp_path: Path
) -> None:
    assert (there.pid, there.is_alive(), there.is_local) == (1, True, False)
    if pid_namespace() == INITIAL_PID_NAMESPACE:  # from where every process is seen
        assert dataclasses.replace(there, started=1).is_alive() is False
    assert _says(APART, ProcessId.own()) == "None"
    boot = tmp_path / "boot_id"
    boot.write_text("another boot\n")
    assert _says((*ANOTHER_HOST, str(boot)), ProcessId.own()) == "None"


@pytest.mark.parametrize("process", [ELSEWHERE, dataclasses.replace(UNSEEN, boot="another")])
def test_a_master_elsewhere_is_listed_for_as_long_as_it_renews_its_file(
    tmp_path: Path, process: ProcessId
) -> None:
    process = dataclasses.replace(process, host="elsewhere")
    far = Published("job", "10.0.0.1", 29400, "", process)
    path = publish(tmp_path, far)
    near = Published("own", "127.0.0.1", 29400, "", ProcessId.own())
    publish(tmp_path, near)
    assert published(tmp_path) == [near, far]  # in the order in which one of a port is looked for
    assert not was_killed(tmp_path, "job", 29400)
    long_ago = path.stat().st_mtime - 2 * FAR_LIMIT
    os.utime(path, (long_ago, long_ago))
    assert published(tmp_path) == [near]
    assert was_killed(tmp_path, "job", 29400)
    renew(path, far)  # the clocks differed: it comes back
    assert published(tmp_path) == [near, far]


def test_a_claim_from_elsewhere_is_believed_for_a_while(tmp_path: Path) -> None:
    whose = f"{ELSEWHERE.pid} 1 {ELSEWHERE.namespace} {ELSEWHERE.boot} {ELSEWHERE.host}"
    claim = tmp_path / ".a-claim-1"
    claim.symlink_to(whose)
    with pytest.raises(Claimed, match="of elsewhere"), claimed(tmp_path, "a"):
        pass
    long_ago = claim.lstat().st_mtime - 2 * FAR_LIMIT
    os.utime(claim, (long_ago, long_ago), follow_symlinks=False)
    with claimed(tmp_path, "a"):
        pass


def test_a_warm_socket_of_another_host_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own, elsewhere = warm.socket_path(os.environ), ("Linux", "elsewhere", "", "", "")
    with monkeypatch.context() as there:
        there.setattr(os, "uname", lambda: os.uname_result(elsewhere))
        far = warm.socket_path(os.environ)
    for path in (own, far):
        with socket.socket(socket.AF_UNIX) as left:
            monkeypatch.chdir(path.parent)  # a socket's path has 107 bytes at most
            left.bind(path.name)
    assert verb.main(["--list"], print) == 0
    assert (own.exists(), far.exists()) == (False, True)
