"""The tutorials are followed as they stand: `pages` reads the blocks of a page, `terminals` types
its commands in real terminals and waits for the output that the page shows."""
