"""Record and replay of a master: all input and output of its state machine.

`words` renders events and effects as lines, `writer` writes the ring of files, `replay` reads a
trace and feeds it to the state machine again. Forbidden here: sockets, grpc, torch, the agent, the
master (its loop gets a writer and knows nothing else of this folder), rules (they are in core/),
and clocks: time comes from the loop or the trace. Only the writer reads a clock, for the date in a
head, and when it is not given the loop's time.
"""
