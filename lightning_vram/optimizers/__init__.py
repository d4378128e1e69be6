"""How optimizers step: with lean parameters and states. Imports ``torch``, never ``lightning``."""
