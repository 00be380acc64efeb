"""What this node's ranks are doing: asked of them, read from /proc, told to the master.

Forbidden here: a decision about the job, and anything that could harm a rank which is well."""
