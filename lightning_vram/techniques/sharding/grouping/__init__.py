"""Which modules are gathered together. May import: core, memory."""
