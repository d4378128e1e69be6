"""The host: the memory and the cores this process may use, control groups of a job included."""
