"""What a person asks of a job that runs: `stacks`, `top` and `events` look, `stop`, `restart`,
`exclude` and `include` act. `asking` finds the job's master. Nothing here knows more of a job than
its master replies; forbidden is what no command line may: torch.
"""
