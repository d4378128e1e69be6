"""Full and sharded state dicts, checked, and written whole or not at all. May import: core, memory."""
