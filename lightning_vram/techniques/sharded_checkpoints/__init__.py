"""Full and sharded state dicts, verified, and written completely or not at all. May import: core, memory."""
