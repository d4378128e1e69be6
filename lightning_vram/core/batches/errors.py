"""A batch that cannot be cut: an error of its own, so that callers can tell it from errors of a model."""


class BatchSplitError(ValueError):
    """A batch cannot be cut into samples; the message names the entry and the ways out."""


class SplitArgumentError(BatchSplitError):
    """It cannot be cut in the way the user gave: that is to be mended, where another batch may run whole."""
