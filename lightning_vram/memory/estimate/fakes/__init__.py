"""A card and ranks that are not there: fake tensors whose programs run to the end on any machine."""
