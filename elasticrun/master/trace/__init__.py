"""WHAT A MASTER LEAVES OF ITSELF: everything that its brain took in and said, and that once more.

`words` has events and effects as lines, `writer` the ring of files, `replay` reads one and gives it
to the brain again. Forbidden here: sockets, grpc, torch, the agent, the master (its loop is handed
a writer and knows no more of it), rules (they are in core/), and clocks: time is what the loop or
the trace says. The writer alone asks one, for the date in a head, and where nobody hands it
the loop's.
"""
