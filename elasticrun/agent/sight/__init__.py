"""Determines what this node's ranks are doing, from their answers, /proc and py-spy; reports it.

Forbidden here: a decision about the job, and anything that could harm a healthy rank."""
