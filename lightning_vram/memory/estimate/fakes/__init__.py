"""A GPU and ranks you do not have: fake tensors whose programs run to the end on any machine."""
