"""Private names of Lightning: Trainer, loops, logging, strategies, callbacks, files, command line."""
