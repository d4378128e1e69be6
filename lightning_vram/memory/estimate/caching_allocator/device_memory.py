"""What the driver gives, and how much of it is taken."""


class DeviceMemory:
    """Memory of a card, as far as this process may have it."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._next_address = 1 << 30

    def take(self, num_bytes: int) -> bool:
        """Reserve memory; ``False`` if there is not as much."""
        reserved_bytes = self.reserved_bytes + num_bytes
        if self.capacity_bytes is not None and reserved_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved_bytes)
        return True

    def give_back(self, num_bytes: int) -> None:
        """Return memory to the driver."""
        self.reserved_bytes -= num_bytes

    def make_addresses(self, num_bytes: int) -> int:
        """Return the start of a range that nobody has: ranges do not touch."""
        address = self._next_address
        self._next_address += num_bytes + (2 << 20)
        return address
