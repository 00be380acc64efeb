"""A trainer that is started as torchtitan is: a module, flags with underscores, a TOML file."""
