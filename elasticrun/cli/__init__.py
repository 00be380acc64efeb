"""TEXT -> CONFIG -> A PROCESS.

`flags` is the table of flags, `resolve` turns flags and environment into `config.AgentConfig`
(pure: what it needs to know of the machine is handed in), `main` starts what was asked for.
Forbidden here: torch, and grpc before an agent, a master or `status` really starts.
"""
