"""What a batch is made of, how to cut it into micro-batches, and how to combine their outputs. May import: memory."""
