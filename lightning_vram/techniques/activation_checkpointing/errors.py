"""What goes wrong when a layer runs a second time."""


class RecomputationError(RuntimeError):
    """The second run of a layer is not what the first was."""
