"""Figures, measured side by side in one run: ``python -m tests.benchmarks --suite memory|speed -o FILE.json``."""
