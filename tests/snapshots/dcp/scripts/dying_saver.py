"""Persist, commit and sweep in children that kill themselves at their n-th call to the file system,
for every n; after each the folder argv[1] must hold a whole checkpoint. Says how many died, and
after how many of these the older or the newer checkpoint was the newest."""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from elasticrun.snapshots.storage import retention
from elasticrun.snapshots.storage.folder import Folder
from elasticrun.snapshots.storage.writing import Calls
from tests.snapshots.dcp.checkpoints import load, save
from tests.snapshots.dcp.slots import HandMade


class Quick(Calls):
    """What is written outlives a process without fsync."""

    def fsync(self, fd: int) -> None:
        pass


class Dying(Quick):
    """Lets so many calls pass."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __getattribute__(self, name: str) -> object:
        if not name.startswith("_") and name != "mounts":
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
        return object.__getattribute__(self, name)


def ranks(step: int) -> list[HandMade]:
    return [
        HandMade(r)
        .chunk("w", is_=torch.full((3000,), float(step)), shape=(6000,), at=(3000 * r,))
        .value("step", is_=step)
        for r in (0, 1)
    ]


def whole(root: str) -> int:
    """The newest step, which is what was saved, as is every other that counts."""
    folder = Folder(root)
    for step in folder.committed():
        assert folder.verify(step) == "", folder.verify(step)
        found = load(folder.path(step), {"w": torch.zeros(6000), "step": 0})
        assert found["step"] == step
        assert bool((found["w"] == step).all())
    return folder.committed()[-1]


def life(root: str, calls: int) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        folder = Folder(root, calls=Dying(calls))
        save(folder, ranks(2), step=2)
        swept = retention.sweep(folder, keep_last=1, keep_every=0)
        code = 0 if swept.removed == (1,) else 3
    finally:
        os._exit(code)


torch.set_num_threads(1)
base = sys.argv[1]
outcomes = {1: 0, 2: 0}
calls = 0
while True:
    root = f"{base}/{calls}"
    save(Folder(root, calls=Quick()), ranks(1), step=1)
    code = life(root, calls)
    newest = whole(root)
    if code == 0:
        assert Folder(root).committed() == [2]
        break
    assert code == -signal.SIGKILL, code
    outcomes[newest] += 1
    # the next attempt is not disturbed
    save(Folder(root, calls=Quick()), ranks(3), step=3, attempt="after")
    assert whole(root) == 3
    shutil.rmtree(root)
    calls += 1
print(calls, outcomes[1], outcomes[2])
