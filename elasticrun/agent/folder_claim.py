"""Whose the folder of checkpoints is: one job's, and of that job one master's (decision 029).

Two jobs that name one folder, or the halves of a job that has split, would remove and replace each
other's checkpoints. So the node of rank 0 claims the folder when its ranks have said which it is,
and a node that has a marker written makes sure of the claim before.

    the claim there      what this node does
    none, or nobody      takes it
    renews it
    of this job          takes it, unless its own master has been succeeded: the claim names the
                         terms of all masters before the one that took it last
    of another job that  writes nothing there, says by whom it is claimed, and looks again
    renews it
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from elasticrun.agent.claims import (
    LOOK_EVERY,
    STALE_LOOKS,
    Claim,
    ClaimError,
    ClaimFile,
    Keeper,
    Looks,
    fresh,
    timed,
)
from elasticrun.agent.threads import in_thread, tell_failure, threadsafe
from elasticrun.operator_log import logger

NAME: Final = "elasticrun.claim"

FILE_LIMIT: Final = 30.0
"""Seconds for one look at the folder, or one change of it."""

CLOSE_LIMIT: Final = 5.0
"""The same at the end."""

PATIENCE: Final = 3.0 * STALE_LOOKS * LOOK_EVERY
"""Seconds that a checkpoint waits until it is known whether another job still has the folder."""

MOST_TERMS: Final = 64
"""Masters before the present one that a claim names."""


class NotOurs(Exception):
    """Another job, or another master of this one, writes there; the text is a sentence."""


class FolderClaim:
    """This node's claim of the folder, if it has one. Belongs to the loop's thread."""

    def __init__(self, job_id: str, term: Callable[[], int]) -> None:
        """`term`: of the master that this node follows."""
        self._job_id = job_id
        self._term = term
        self._url = ""
        self._file: ClaimFile | None = None
        self._keeper: Keeper | None = None
        self._looks = Looks()
        self._why = ""  # why it is not ours, as far as that is settled
        self._told: set[str] = set()
        self._looking: asyncio.Task[bool] | None = None
        self._watch: asyncio.Task[None] | None = None

    def want(self, url: str) -> None:
        """The ranks of this node, rank 0 among them, have their checkpoints there."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._hold(url))
            tell_failure(self._watch, logger.error, "claiming the folder of checkpoints")

    async def sure(self, url: str) -> None:
        """Return when this node may write a marker there. NotOurs, after PATIENCE at most."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while not await self._look(url):
            if self._why or asyncio.get_running_loop().time() >= end:
                raise NotOurs(self._why or f"it is not known whose {url} is")
            await asyncio.sleep(LOOK_EVERY)

    async def close(self) -> None:
        """Nothing is written any more."""
        if self._watch is not None:
            self._watch.cancel()
        if self._looking is not None and not self._looking.done():
            await asyncio.wait({self._looking}, timeout=CLOSE_LIMIT)
        keeper, file = self._keeper, self._file
        self._keeper = None
        if keeper is None or file is None:
            return

        def leave() -> None:
            keeper.close()
            file.remove()

        try:
            await in_thread(leave, limit=CLOSE_LIMIT, name="claim")
        except TimeoutError:
            logger.warning("%s was not removed: its file system does not answer", file.path)

    # ------------------------------------------------------------ looking

    async def _hold(self, url: str) -> None:
        """Until it is ours; what is in the way is said as soon as it is known."""
        while not await self._look(url):
            if self._why:
                self._tell(f"no checkpoint is written: {self._why}")
            await asyncio.sleep(LOOK_EVERY * random.uniform(1.0, 1.25))

    async def _look(self, url: str) -> bool:
        """Whether it is ours, or nobody's to claim. One look at a time, each to its end: a claim
        that was made has to be renewed, whoever waits for it no more."""
        while self._looking is not None and not self._looking.done():
            await asyncio.wait({self._looking})
        self._looking = asyncio.create_task(self._look_once(url))
        return await asyncio.shield(self._looking)

    async def _look_once(self, url: str) -> bool:
        path = _local(url)
        if path is None:
            self._tell(f"{url} is no folder of a file system, so no job claims it", "info")
            return True
        try:
            return await self._try(path)
        except ClaimError as wrong:
            self._tell(f"checkpoints are written without a claim of their folder: {wrong}")
            return True
        except TimeoutError:
            self._why = f"{path} has not answered for {FILE_LIMIT:g} s"
            return False

    async def _try(self, path: str) -> bool:
        if self._file is None or self._url != path:
            await self._let_other_go()
            self._url, self._file, self._looks = path, _claim_file(path), Looks()
        file = self._file
        claim, took = await in_thread(partial(_first, file, path), limit=FILE_LIMIT, name="claim")
        term = self._term()
        if claim is not None and claim.words.get("job") != self._job_id:
            self._looks.look(claim, took)
            if not self._looks.is_stale(claim):
                if self._looks.renewed:
                    self._why = (
                        f"{path} is claimed by job {claim.text('job')} on {claim.text('host')}, "
                        "which renews its claim: end that job, or name another folder"
                    )
                return False
        elif claim is not None and term in _terms(claim):
            self._why = (
                f"{path} is claimed by another master of this job, on {claim.text('host')}: the "
                "one that this node follows was succeeded"
            )
            return False
        elif claim is not None and file.mine is not None and claim.is_of(file.mine.holder, term):
            self._why = ""
            return True
        return await self._take(file, claim, term)

    async def _take(self, file: ClaimFile, claim: Claim | None, term: int) -> bool:
        if self._keeper is not None:
            await in_thread(self._keeper.close, limit=FILE_LIMIT, name="claim")
            self._keeper = None
        past: list[int] = []
        if claim is not None and claim.words.get("job") == self._job_id:
            past = [one for one in (*_terms(claim), claim.number("term")) if one != term]
        words: dict[str, Any] = {
            "job": self._job_id,
            "host": os.uname().nodename,
            "term": term,
            "before": past[-MOST_TERMS:],
        }
        taken = await in_thread(
            partial(file.take, fresh(words), claim), limit=FILE_LIMIT, name="claim"
        )
        if not taken:
            return False
        self._why = ""
        self._keeper = Keeper(file)
        loop = asyncio.get_running_loop()
        self._keeper.attach(
            lambda other: threadsafe(loop, self._lost, other), lambda sentence: None
        )
        return True

    def _lost(self, other: Claim) -> None:
        """Another node of this job has it now, which is as it should be; or another job."""
        self._keeper = None
        if other.words.get("job") != self._job_id:
            self._tell(
                f"{self._url} was taken over by job {other.text('job')} on {other.text('host')}, "
                "which has seen no renewal of this job's claim"
            )

    async def _let_other_go(self) -> None:
        """Another folder is named now."""
        if self._keeper is not None and self._file is not None:
            keeper, file = self._keeper, self._file
            self._keeper = None
            await in_thread(keeper.close, limit=FILE_LIMIT, name="claim")
            await in_thread(file.remove, limit=FILE_LIMIT, name="claim")

    def _tell(self, sentence: str, level: str = "warning") -> None:
        if sentence not in self._told and len(self._told) < MOST_TERMS:
            self._told.add(sentence)
            getattr(logger, level)("%s", sentence)


def _local(url: str) -> str | None:
    """The path of a folder in a file system; None for what only fsspec reaches."""
    if "://" not in url:
        return url
    return url.removeprefix("file://") if url.startswith("file:///") else None


def _claim_file(path: str) -> ClaimFile:
    return ClaimFile(os.path.join(path, NAME), private=False)


def _first(file: ClaimFile, path: str) -> tuple[Claim | None, float]:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ClaimError(f"{path} cannot be made: {error.strerror}") from None
    return timed(file)


def _terms(claim: Claim) -> list[int]:
    found = claim.words.get("before", [])
    return [one for one in found if type(one) is int] if isinstance(found, list) else []
