"""The reader's side of `Reach`: ask the job's master to dial us."""

from __future__ import annotations

from typing import Final

from elasticrun.wire.channel import SERVICE, LinkError, ask
from elasticrun.wire.ids import Endpoint
from elasticrun.wire.messages import Reached, ReachMe
from elasticrun.wire.proof import Guest
from elasticrun.wire.tls import Pem

REACH: Final = f"/{SERVICE}/Reach"


async def reach_me(
    endpoint: Endpoint,
    timeout: float,
    asked: ReachMe,
    *,
    token: str = "",
    tls: Pem | None = None,
    name: str = "",
    version: str = "doctor",
) -> Reached:
    """Have the master at `endpoint` dial us as `asked`, and tell what it knows of us; `token` is a
    reader's (`proof.reader_token`). LinkError as with `channel.get_status`."""
    answer = await ask(REACH, Guest(token, version), asked, endpoint, timeout, tls=tls, name=name)
    if isinstance(answer, Reached):
        return answer
    raise LinkError(f"it answered with {type(answer).__name__}", rejected=True)
