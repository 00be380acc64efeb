"""Verbs for one job: `status`, `top`, `stacks`, `events`, `incidents`, `logs` and `ckpt` show it;
`stop`, `restart`, `exclude`, `include` and `scale` change it.

`master_lookup` finds the job's master. Of a running job, all but `logs` and `ckpt` show what the
master replies; of one that has ended, what its run folder contains. Forbidden, as in every part of
the command line: torch.
"""
