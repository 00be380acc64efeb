"""Next door to the module that is run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(module: dict[str, Any]) -> None:
    """Write how the module that was run looks from inside."""
    picture = {
        "environ": dict(os.environ),
        "argv": sys.argv,
        "path0": sys.path[0],
        "cwd": os.getcwd(),
        "name": module["__name__"],
        "package": module["__package__"],
        "file": module["__file__"],
        "spec": module["__spec__"].name,
    }
    name = f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}.json"
    Path(os.environ["DUMP_DIR"], name).write_text(json.dumps(picture))
