"""What goes wrong with host memory and disks."""


class OffloadError(RuntimeError):
    """The host or the disk is too small, or fails."""
