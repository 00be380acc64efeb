"""`python -m elasticrun.sim SCRIPT... [--rewrite]`"""

from __future__ import annotations

import sys

from elasticrun.sim.script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
