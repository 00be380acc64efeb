"""The health of this node while the job runs: what is watched, and what the master learns of it.

Everything that may block (the user's health command, a driver) runs in a child process with a time
limit. Forbidden here: deciding what follows from a finding (`core/health`), and touching ranks.
"""
