"""`python -m elasticrun` is the command `elasticrun`."""

from __future__ import annotations

import sys

from elasticrun.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
