"""What is done with a weight while it is gathered: reads, writes, uses. May import: core, memory."""
