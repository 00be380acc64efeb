"""What clusters let the interpreter run at its start, for the rank that it is."""

import os

os.environ["FIDELITY_SITE"] = f"{os.environ.get('RANK')} {os.environ.get('OMP_NUM_THREADS')}"
pid = os.getpid()
