"""Functions that survivors call again in the same process."""
