"""WHAT IS WRONG WITH THIS MACHINE: checks, each with what was seen and what to do about it.

One module a family of checks. Each takes its facts through small functions, from a root folder
where they are files; `checkup` runs them side by side, each bounded in time. What needs the job's
master (clock, ports, packet size, host names) gets its answer handed in: whoever asks has the
connection. Forbidden here: gRPC and torch, changing anything on the machine (but for a file without
a name, to see whether a folder takes one), waiting without a limit, and ending a job: a finding is
told, and what follows from it is the caller's.
"""
