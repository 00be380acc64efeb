"""Starting a job's agents on hosts that are named, by the system's ssh: which hosts (`hostfile`),
what starts an agent there and tells of it (`far`), one host's connection (`ssh`), all of a job
(`fleet`).

Forbidden here: grpc, torch, and whatever asks a person for a password.
"""
