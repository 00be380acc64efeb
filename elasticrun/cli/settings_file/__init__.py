"""Settings from a file: `keys` checks them and turns them into words of the command line (pure),
`find` reads the file and adds the words to a command. Forbidden here: values that only a file can
set; each key is a flag."""
