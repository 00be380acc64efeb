"""The command line: from text to a configuration to a process.

`flags` builds the parser. `resolve` turns flags and environment into `config.Launch`, `Place` and
`Identity`; it is pure, facts about the machine are arguments. `main` starts the process. Forbidden
here: torch, and grpc before an agent, a master or `status` really starts.
"""
