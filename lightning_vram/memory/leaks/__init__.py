"""Find memory that grows with the steps of a training, what allocated it, and which attribute holds it."""
