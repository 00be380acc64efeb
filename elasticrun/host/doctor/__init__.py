"""Diagnosis of this machine: checks, each with findings and what to do about them.

One module per family of checks. `checkup` runs the families in parallel, each with a time limit.
Checks read files below a root folder that tests can replace. Checks that need the job's master
(clock, ports, packet size, host names) receive its answer from the caller, which has the
connection. Forbidden here: gRPC and torch, changing anything on the machine (except an unnamed file
that tests whether a folder is writable), waiting without a limit, and ending a job, because only
the caller decides what follows from a finding.
"""
