"""What a person asks of a job that runs: `stacks`, `top` and `events` look, `stop`, `restart`,
`exclude` and `include` act. `asking` finds the job's master, and they know no more of a job than
it replies; `logs` reads the files of this host. Forbidden is what no command line may: torch.
"""
