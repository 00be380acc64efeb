"""The lab: hosts that see each other until something befalls a cable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.testing import hosts, processes
from elasticrun.testing.hosts import NETNS, Lab
from elasticrun.testing.processes import Deadline
from tests import needs
from tests.harness import LIMIT

pytestmark = pytest.mark.slow

ECHO = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 9000))
print("ready", flush=True)
heard = 0
while True:
    data, where = s.recvfrom(100)
    if data == b"how many":
        heard_so_far, heard = heard, 0
        print(heard_so_far, flush=True)
        continue
    heard += 1
    s.sendto(data, where)
"""
"""Sends back what it gets; when asked from its own host it says how much that was."""

ASK = """
import socket, sys, time
count, limit, to_the_end = int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "True"
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect((sys.argv[1], 9000))
s.settimeout(limit)
back, fastest = set(), 1e9

def returns(word):
    try:
        s.send(word)
        while word not in back:
            back.add(s.recv(100))
        return True
    except OSError:
        return False

for number in range(count):
    began = time.monotonic()
    if returns(b"%d" % number):
        fastest = min(fastest, time.monotonic() - began)
while to_the_end and not returns(b"end"):
    pass
print(len(back - {b"end"}), fastest)
"""
"""How many datagrams have come back by the end, those that took longer than the limit too."""


class Street:
    """A lab of three hosts, on each of which somebody answers."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.echoes: dict[str, subprocess.Popen[str]] = {}
        for name in ("a", "b", "c"):
            host = lab.add(name)
            echo = self.on(name, ECHO, host.address)
            assert echo.stdout.readline() == "ready\n"
            self.echoes[name] = echo

    def on(self, name: str, program: str, *words: str) -> subprocess.Popen[str]:
        """A Python program on a host."""
        command = [*self.lab.prefix(name), sys.executable, "-c", program, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def ask(
        self,
        sender: str,
        receiver: str,
        count: int = 1,
        limit: float = 60.0,
        *,
        to_the_end: bool = False,
    ) -> tuple[int, float]:
        """How many of `count` datagrams came back, and how long the fastest took. The next one is
        sent after `limit` seconds at most. `to_the_end`: until a last one is back, which none of
        them can be behind."""
        words = (self.lab.hosts[receiver].address, str(count), str(limit), str(to_the_end))
        said, _ = self.on(sender, ASK, *words).communicate(timeout=240)
        back, fastest = said.split()
        return int(back), float(fastest)

    def heard(self, name: str) -> int:
        """How many datagrams have reached a host since it was asked last."""
        where = f"({self.lab.hosts[name].address!r}, 9000)"
        program = (
            "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"
            f".sendto(b'how many', {where})"
        )
        self.on(name, program).communicate(timeout=240)
        out = self.echoes[name].stdout
        return int(out.readline())

    def close(self) -> None:
        """Everything goes with the lab."""
        self.lab.close()
        for echo in self.echoes.values():
            echo.communicate(timeout=240)


@pytest.fixture
def street(tmp_path: Path) -> Iterator[Street]:
    """Three hosts; skipped where none can be made."""
    needs.several_hosts(lines=True)
    before = ours()  # other fixtures of this process may have a lab for longer
    lab = Lab(tmp_path)
    made = Street(lab)
    yield made
    made.close()
    assert ours() <= before


def ours() -> set[str]:
    """The namespaces that this process has made."""
    return {name for name in os.listdir(NETNS) if f"-{os.getpid()}-" in name}


LOST = 0.3
"""Seconds after which a datagram that has not come back is taken for lost."""


def test_cables_are_pulled_and_plugged_in(street: Street) -> None:
    lab = street.lab
    assert street.ask("a", "b")[0] == 1
    lab.cut("b")
    assert street.ask("a", "b", limit=LOST)[0] == 0
    assert street.ask("a", "c")[0] == 1
    lab.plug("b")
    assert street.ask("a", "b", count=20, limit=5.0)[0] >= 1
    lab.disconnect("a", "c")
    assert street.ask("a", "c", limit=LOST)[0] == street.ask("c", "a", limit=LOST)[0] == 0
    assert street.ask("a", "b")[0] == street.ask("c", "b")[0] == 1
    lab.mend()
    assert street.ask("a", "c", count=20, limit=5.0)[0] >= 1


def test_a_host_goes_and_comes_back_at_another_address(street: Street) -> None:
    """Those that run see the new address under the old name; who ran on the old one has gone."""
    lab, name = street.lab, "pod-0.job"
    asks = "import socket, sys; sys.stdin.read(1); print(*socket.gethostbyname_ex('pod-0'))"
    first = lab.add(name).address
    guest = street.on(name, "import signal; print(flush=True); signal.pause()")
    guest.stdout.readline()
    watcher = subprocess.Popen(
        [*lab.prefix("a"), sys.executable, "-c", asks],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    lab.remove(name)
    assert guest.wait(240) == -signal.SIGKILL
    second = lab.add(name).address
    assert second != first
    told, _ = watcher.communicate("!", timeout=240)
    assert told.split() == ["pod-0.job", "['pod-0']", f"['{second}']"]
    assert (
        street.on(name, "import socket; print(socket.gethostname())").communicate()[0] == "pod-0\n"
    )


def test_a_host_that_is_heard_but_does_not_hear(street: Street) -> None:
    """The answers of b do not reach a; what a sends does reach b."""
    street.ask("a", "b")  # so that each knows the other's hardware address
    street.lab.one_way("b", "a")
    street.heard("b")
    assert street.ask("a", "b", count=3, limit=LOST)[0] == 0
    heard, deadline = 0, Deadline(60)
    while heard < 3 and not deadline.over():  # what was sent last may still be on its way
        heard += street.heard("b")
    assert heard == 3
    assert street.ask("c", "a")[0] == 1


def test_loss_and_delay(street: Street) -> None:
    """200 datagrams, of which 30 % are lost on the way back: 140 return, give or take 6 sigma."""
    street.ask("a", "b")  # so that each knows the other's hardware address
    street.lab.loss("a", 0.3)
    back, _ = street.ask("a", "b", count=200, limit=0.01, to_the_end=True)
    assert 100 <= back <= 180
    street.lab.mend()
    street.lab.delay("a", 0.1)
    back, fastest = street.ask("a", "b")
    assert back == 1
    assert fastest >= 0.2, "0.1 s each way"


TAKE = """
import socket, sys
server = socket.create_server((sys.argv[1], 9001))
print("ready", flush=True)
taker, _ = server.accept()
count = 0
while data := taker.recv(65536):
    count += len(data)
taker.sendall(b"%d" % count)
"""

GIVE = """
import socket, sys, time
giver = socket.create_connection((sys.argv[1], 9001))
began = time.monotonic()
giver.sendall(bytes(int(sys.argv[2])))
giver.shutdown(socket.SHUT_WR)
print(giver.recv(100).decode(), time.monotonic() - began)
"""


def test_a_slow_link(street: Street) -> None:
    """1 Mbit passes a line of 2 Mbit/s in half a second at best, and nothing of it is lost."""
    street.lab.slow("b", 2e6 / 8)
    address = street.lab.hosts["b"].address
    taker = street.on("b", TAKE, address)
    assert taker.stdout.readline() == "ready\n"
    said, _ = street.on("a", GIVE, address, "125000").communicate(timeout=240)
    taker.communicate(timeout=240)
    count, took = said.split()
    assert int(count) == 125_000
    assert float(took) >= 0.5


def test_a_flapping_link(street: Street) -> None:
    street.lab.flap("a", down=0.2, up=0.2)
    back, sent, deadline = 0, 0, Deadline(LIMIT)
    while not 0 < back < sent and not deadline.over():  # what flaps it may stand still for a while
        back += street.ask("a", "b", count=2000, limit=0.05)[0]
        sent += 2000
    assert 0 < back < sent


def test_hosts_have_names_and_see_nothing_of_this_machine(street: Street) -> None:
    program = (
        "import socket; print(socket.gethostname(), socket.gethostbyname('a'), "
        "socket.gethostbyname('localhost'), [n for _, n in socket.if_nameindex()])"
    )
    said, _ = street.on("b", program).communicate(timeout=240)
    assert said.split()[:3] == ["b", "192.0.2.1", "127.0.0.1"]
    assert "'lo'" in said
    assert "'eth0'" in said
    assert said.count("'") == 4


ABANDONS = """
import subprocess, sys
from pathlib import Path
from elasticrun.testing.hosts import Lab
lab = Lab(Path(sys.argv[1]))
host = lab.add("left")
sleeper = subprocess.Popen(
    [*lab.prefix("left"), "sh", "-c", "echo; exec sleep 1000"],
    stdout=subprocess.PIPE,
    start_new_session=True,
)
sleeper.stdout.readline()  # it is on the host
print(host.namespace, sleeper.pid, lab.keeper, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("keeper_too", [False, True], ids=["kept", "swept"])
def test_what_a_killed_process_has_left_is_removed(tmp_path: Path, keeper_too: bool) -> None:
    """By its keeper, at once; where that was killed as well, by the next lab."""
    needs.several_hosts()
    owner = subprocess.Popen(
        [sys.executable, "-c", ABANDONS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    namespace, *pids = owner.stdout.readline().split()
    sleeper, keeper = map(int, pids)
    hosts.sweep()
    assert (NETNS / namespace).exists(), "its owner lives"
    if keeper_too:
        os.kill(keeper, signal.SIGKILL)
    owner.send_signal(signal.SIGKILL)
    owner.wait(240)
    assert not processes.await_end([keeper], 240)
    if keeper_too:
        hosts.sweep()  # if no lab of another test has done so by now
    assert not (NETNS / namespace).exists()
    assert not processes.await_end([sleeper], 240)
    owner.communicate(timeout=240)
