"""A Trainer that is about to run: its arguments, first batch and free memory, and a decision that all ranks share."""
