"""Detects this node's place in its job from a scheduler's environment.

One module per family of schedulers; `detect` tries them in order. Each family is a function from
the environment and a few given facts (`HostFacts`) to `Found`, with the source of every value. The
caller decides how to use it: a flag always takes precedence, and a bare command means the same as
under torchrun unless the scheduler has clearly started one agent on each of several nodes.
Forbidden here: I/O, clocks, processes, sockets, reading `os.environ`, and raising for values that a
scheduler leaves out or writes in an unknown form: these yield a sentence.
"""
