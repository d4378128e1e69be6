"""How many samples run at once: measured or given, agreed among ranks, remembered. May import: core, memory."""
