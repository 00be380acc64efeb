"""Record and replay of a master: all input and output of its state machine.

`words` renders events and effects as lines, `writer` writes the ring of files, `replay` reads a
trace and feeds it to the state machine again, `chrome` draws it as a timeline. Forbidden here:
sockets, grpc, torch, the agent, the rest of the master (whose loop uses only the writer), rules
(they are in core/), and clocks: time comes from the loop or the trace. Only the writer reads a
clock, for the date in a head, and for its start if the loop's time is not passed to it.
"""
