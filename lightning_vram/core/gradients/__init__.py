"""Scale, clip and reduce gradients, sparse and sharded ones too. May import: memory."""
