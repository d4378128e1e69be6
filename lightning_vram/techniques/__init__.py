"""What to do: one verb per technique, which returns its undo. Imports ``torch``, never ``lightning``."""
