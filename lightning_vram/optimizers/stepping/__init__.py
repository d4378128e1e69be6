"""How others step in the place of an optimizer."""
