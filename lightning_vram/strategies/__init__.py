"""Lightning strategies, and the parts only they need."""
