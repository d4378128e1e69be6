"""What stands in for CUDA's dispatcher on a machine without a card."""
