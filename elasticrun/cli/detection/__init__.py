"""WHERE AM I: what a scheduler's environment says about this node's place in its job.

One module a family of schedulers; `detect` asks them in order. Each is a function from the
environment and a few facts that are handed in (`Facts`) to `Found`, with the source of every value.
What comes of it is the command line's business: a flag always counts more, and a bare command means
what it means under torchrun unless the scheduler has plainly started one agent on each of several
nodes. Forbidden here: I/O, clocks, processes, sockets, reading `os.environ`, and raising for what a
scheduler has left out or written in another way than we know: that is a sentence.
"""
