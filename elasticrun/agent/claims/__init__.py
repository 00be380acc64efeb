"""Claims: which of the machines that share a folder has a role (`claim_file`), and which job writes
into a checkpoint folder (`folder_claim`).

Forbidden here: torch, file locks, and comparing clocks of two hosts.
"""
