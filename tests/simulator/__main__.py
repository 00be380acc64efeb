"""`python -m tests.simulator SCRIPT... [--rewrite]`"""

from __future__ import annotations

import sys

from tests.simulator.script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
