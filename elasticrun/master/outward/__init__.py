"""What the master writes for people and other programs: the run folder, incidents, events.

Forbidden here: anything that the serving master waits for. Threads with bounded queues do the work;
what exceeds a queue is dropped."""
