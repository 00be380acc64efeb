"""A thread in every rank, but those that are exec'd, that tells its agent, when asked, what the
rank is doing.

Forbidden here: a lock that the script's threads may hold, an import of torch, a word that was not
asked for. It must cost a rank nothing that can be measured, and end with it."""
