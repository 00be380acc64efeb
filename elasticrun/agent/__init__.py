"""THE AGENT (shell), one per node: carries out what `core.worker` decides.

Owns the loop, the link to the master, the conversation with the spawner, the environment of ranks,
their logs and error files, and the processes it had to start. Forbidden here: rules about rounds,
restarts and deaths (they are in core/), torch (but for a named plug-in, announced by a line), and
anything that can block on a disk or a terminal in the loop: that goes to a thread.
"""
