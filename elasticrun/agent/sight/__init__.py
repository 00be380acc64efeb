"""What this node's ranks are doing: queried from them, read from /proc, reported to the master.

Forbidden here: a decision about the job, and anything that could harm a healthy rank."""
