"""Verbs for one running job: `stacks`, `top` and `events` show it; `stop`, `restart`, `exclude` and
`include` change it.

`master_lookup` finds the job's master; the verbs know only what the master replies. `logs` reads
the files on this host. Forbidden, as in every part of the command line: torch.
"""
