"""The contract as tables: the installed torch's torchrun beside elasticrun, on one script."""
