"""A WORLD WITHOUT MACHINES: the real brains under a virtual clock and a lossy network.

Forbidden here: anything real (clocks, sockets, processes), and other tests. What the simulator
shows is what the brains would do, because they are the very same objects that the agent and the
master run.
"""
