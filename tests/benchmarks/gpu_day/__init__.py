"""Everything that waits for a GPU, in the order of its worth: see ``python -m tests.benchmarks.gpu_day --help``."""
