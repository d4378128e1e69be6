"""Lightning strategies."""
