"""What a user is told to do next where a master or a node cannot be reached: ask the doctor."""

from __future__ import annotations

from typing import Final

_NO_MASTER: Final = ("no master answer", "no job master answer", "does not answer this node")
_NO_NODE: Final = "nothing was heard for"


def directed(sentence: str, dial: object = "") -> str:
    """The sentence, with what looks for the cause at its end if it is about somebody who cannot be
    reached. `dial`: where the master is looked for, if that is not known to the reader."""
    if any(words in sentence for words in _NO_MASTER):
        where = f" --rdzv-endpoint={dial}" if dial else ""
        return f"{sentence}; to find out why, run here: elasticrun doctor{where}"
    if _NO_NODE in sentence:
        return f"{sentence}; to find out why, run on that node: elasticrun doctor"
    return sentence
