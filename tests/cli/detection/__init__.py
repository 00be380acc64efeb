"""Where a scheduler has put this node: its environment as recorded, and what is made of it."""
