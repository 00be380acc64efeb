"""The claim on a checkpoint folder: only one job, and within it only one master, writes there."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from elasticrun.agent.claims.claim_file import (
    FILE_LIMIT,
    READ_EVERY,
    STALE_READS,
    Claim,
    ClaimError,
    ClaimFile,
    ClaimRenewer,
    NotWritable,
    Renewals,
    new_claim,
    on_disk,
    timed_read,
)
from elasticrun.agent.runtime import Once, Tasks, in_thread, threadsafe
from elasticrun.host.log import logger

NAME: Final = "elasticrun.claim"
"""The claim file in a checkpoint folder."""

FOLDER_CLOSE_LIMIT: Final = 5.0
"""Seconds that `FolderClaim.close` waits for a check in progress, and again for the removal of the
claim."""

PATIENCE: Final = 3.0 * STALE_READS * READ_EVERY
"""Seconds that a checkpoint waits to find out whether another job still claims the folder."""

MOST_TERMS: Final = 64
"""Maximum number of earlier master terms that a claim lists."""


class NotOurs(Exception):
    """Another job, or another master of this one, writes to the folder; the text is a sentence."""


class FolderClaim:
    """This node's claim on the checkpoint folder, if it has one. The folder belongs to one job, and
    within that job to one master. Used in the loop's thread only.

    Two jobs with the same folder, or two halves of a partitioned job, would remove and replace each
    other's checkpoints. So the node of rank 0 claims the folder as soon as its ranks have reported
    it, and verifies the claim before each marker is written.

        the claim there      what this node does
        none, or stale       takes it
        of this run          takes it, unless its own master has been replaced: the claim lists the
                             terms of all masters before the one that took it last
        of another run or    writes nothing there, reports who claims it, and checks again
        job that renews it

    A claim is of this run if this node has followed the master whose term it names. So a second
    start of a job with the same id, while the first one runs, does not take the folder.
    """

    def __init__(self, job_id: str, term: Callable[[], int], name: str = "") -> None:
        """`term`: returns the term of the master that this node follows. `name`: the job's name for
        people; "": its id."""
        self._job_id = job_id
        self._name = name or job_id
        self._term = term
        self._followed: deque[int] = deque(maxlen=MOST_TERMS)
        self._path = ""
        self._file: ClaimFile | None = None
        self._renewer: ClaimRenewer | None = None
        self._renewals = Renewals()
        self._why_not_ours = ""  # why the folder is not ours, once that is certain
        self._once = Once(MOST_TERMS)
        self._tasks = Tasks(logger.error)
        self._checking: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self, url: str) -> None:
        """Start claiming this folder, to which the job's ranks write checkpoints; rank 0 is on this
        node. No-op while an earlier call is still claiming."""
        if self._watch is None or self._watch.done():
            self._watch = self._tasks.start(self._hold(url), "claiming the folder of checkpoints")

    def follow(self, term: int, *, has_rank_0: bool) -> None:
        """A round of the master of this term begins. Gives the claim back if rank 0 is elsewhere
        now: its node may be new, and then knows no other term."""
        if term not in self._followed:
            self._followed.append(term)
        if has_rank_0 or (self._watch is None and self._renewer is None):
            return
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        # a check that begins now waits for it: rank 0 may be back before the file is removed
        given_back = self._give_back(self._checking)
        self._checking = self._tasks.start(given_back, "giving a folder's claim back")

    async def verify(self, url: str) -> None:
        """Wait until this node may write a marker there. Raises NotOurs as soon as it is certain
        that it may not, and after PATIENCE at the latest."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while not await self._claim(url):
            if self._why_not_ours or asyncio.get_running_loop().time() >= end:
                raise NotOurs(self._why_not_ours or f"the claim of {url} is unknown")
            await asyncio.sleep(READ_EVERY)

    async def close(self) -> None:
        """Stop renewing the claim and remove it; nothing is written any more. Logs a warning if the
        file system does not answer."""
        if self._watch is not None:
            self._watch.cancel()
        await self._give_back(self._checking)

    async def _give_back(self, checking: asyncio.Task[object] | None) -> None:
        """Remove our claim. `checking`: the last check, which may be about to take it."""
        if checking is not None and not checking.done():
            await asyncio.wait({checking}, timeout=FOLDER_CLOSE_LIMIT)
        try:
            await self._leave(FOLDER_CLOSE_LIMIT)
        except TimeoutError:
            path = os.path.join(self._path, NAME)
            logger.warning("%s was not removed: its file system does not answer", path)

    async def _leave(self, limit: float) -> None:
        """Stop renewing our claim and remove it. Raises TimeoutError after `limit` seconds."""
        renewer, self._renewer = self._renewer, None
        if renewer is not None:
            await in_thread(renewer.remove, limit=limit, name="claim")

    # ------------------------------------------------------------ looking

    async def _hold(self, url: str) -> None:
        """Check until the folder is ours; log an obstacle as soon as it is known."""
        while not await self._claim(url):
            if self._why_not_ours:
                self._once.log(f"no checkpoint is written: {self._why_not_ours}")
            await asyncio.sleep(READ_EVERY * random.uniform(1.0, 1.25))

    async def _claim(self, url: str) -> bool:
        """Claim the folder if that is possible; returns whether it is ours or needs no claim. Only
        one check runs at a time, and it is never cancelled: a claim that it takes has to be renewed
        even if the caller has gone."""
        while self._checking is not None and not self._checking.done():
            await asyncio.wait({self._checking})
        checking = self._tasks.start(self._claim_once(url), "checking a folder's claim")
        self._checking = checking
        return await asyncio.shield(checking)

    async def _claim_once(self, url: str) -> bool:
        path = _local(url)
        if path is None:
            words = f"{url} is not on a file system, so it cannot be claimed"
            self._once.log(words, logging.INFO)
            return True
        try:
            return await self._claim_path(path)
        except NotWritable as wrong:
            remedy = "use a folder that this node can write to"
            self._once.log(f"no checkpoint can be written: {wrong}; {remedy}")
            return True
        except ClaimError as wrong:
            self._once.log(f"checkpoints are written without a claim of their folder: {wrong}")
            return True
        except TimeoutError:
            self._why_not_ours = f"{path} has not answered for {FILE_LIMIT:g} s"
            return False

    async def _claim_path(self, path: str) -> bool:
        if self._file is None or self._path != path:
            await self._leave(FILE_LIMIT)  # the ranks use another folder now
            self._path, self._renewals = path, Renewals()
            self._file = ClaimFile(os.path.join(path, NAME), private=False)
        file = self._file
        claim, took = await on_disk(partial(_read_in_folder, file, path))
        term = self._term()
        if claim is not None and self._is_same_job(claim) and term in _terms(claim):
            self._why_not_ours = (
                f"{path} is claimed by another master of this job, on {claim.text('host')}, "
                "which has replaced this node's master"
            )
            return False
        if claim is not None and not self._is_same_run(claim, term):
            self._renewals.observe(claim, took)
            if not self._renewals.is_stale(claim):
                if self._renewals.renewed:
                    which = "one of the two" if self._is_same_job(claim) else "that job"
                    self._why_not_ours = (
                        f"{path} is claimed by {self._holder(claim)}, "
                        f"which renews its claim: end {which}, or use another folder"
                    )
                return False
        elif claim is not None and file.mine is not None and claim.is_of(file.mine.holder, term):
            self._why_not_ours = ""
            return True
        return await self._take(file, claim, term)

    async def _take(self, file: ClaimFile, claim: Claim | None, term: int) -> bool:
        if self._renewer is not None:
            await on_disk(self._renewer.close)
            self._renewer = None
        past: list[int] = []
        if claim is not None and self._is_same_job(claim):
            past = [one for one in (*_terms(claim), claim.number("term")) if one != term]
        words: dict[str, Any] = {
            "job": self._job_id,
            "name": self._name,
            "host": os.uname().nodename,
            "term": term,
            "before": past[-MOST_TERMS:],
        }
        if not await on_disk(partial(file.take, new_claim(words), claim)):
            return False
        self._why_not_ours = ""
        self._renewer = ClaimRenewer(file)
        loop = asyncio.get_running_loop()
        self._renewer.attach(
            lambda other: threadsafe(loop, self._lost, other), lambda sentence: None
        )
        return True

    def _lost(self, other: Claim) -> None:
        """The claim was taken over by another node of this job, which is normal (or reported by the
        next check), or by another job, which is logged."""
        self._renewer = None
        if not self._is_same_job(other):
            self._once.log(
                f"{self._path} was taken over by {self._holder(other)}, "
                "because this job's claim was not renewed in time"
            )

    def _is_same_job(self, claim: Claim) -> bool:
        return claim.words.get("job") == self._job_id

    def _is_same_run(self, claim: Claim, term: int) -> bool:
        return self._is_same_job(claim) and claim.number("term") in (term, *self._followed)

    def _holder(self, claim: Claim) -> str:
        name = claim.text("name") or claim.text("job")
        which = "another start of " if self._is_same_job(claim) else ""
        return f"{which}job {name} on {claim.text('host')}"


def _local(url: str) -> str | None:
    """The local path that a checkpoint URL names; None for a URL that only fsspec can open."""
    if "://" not in url:
        return url
    return url.removeprefix("file://") if url.startswith("file:///") else None


def _read_in_folder(file: ClaimFile, path: str) -> tuple[Claim | None, float]:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise NotWritable(f"{path} cannot be created: {error.strerror}") from None
    return timed_read(file)


def _terms(claim: Claim) -> list[int]:
    found = claim.words.get("before", [])
    return [one for one in found if type(one) is int] if isinstance(found, list) else []
