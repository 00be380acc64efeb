"""DIAGNOSIS OF THIS MACHINE: checks, each with a finding and what to do about it.

One module per family of checks. Each reads its facts through small functions, below a root folder
if they are files; `checkup` runs them in parallel, each with a time limit. Checks that need the
job's master (clock, ports, packet size, host names) receive its answer from the caller, which has
the connection. Forbidden here: gRPC and torch, changing anything on the machine (except for an
unnamed file that tests whether a folder is writable), waiting without a limit, and ending a job:
findings are reported, and the caller decides.
"""
