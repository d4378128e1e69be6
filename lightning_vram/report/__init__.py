"""Tables out of measurements: what a person reads."""
