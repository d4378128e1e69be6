"""What a Trainer that is about to run tells: its arguments, its first batch, and what its device has left."""
