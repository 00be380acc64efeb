"""The agent, one process per node: carries out what `core.worker` decides (I/O, no decisions).

It owns the event loop, the link to the master, the spawner's socket, the environment, logs and
error files of ranks, and the helper processes that it starts. Forbidden here: rules about rounds,
restarts and failures (they are in core/), torch (except for a plug-in that the user names; a log
line announces it), and anything in the loop that can block on a disk or a terminal: use a thread.
"""
