"""What the master hands to people and to other programs: files of incidents, events.

Forbidden here: anything that the master waits for. Threads with bounded queues do it; what they
cannot keep up with is dropped, and told once."""
