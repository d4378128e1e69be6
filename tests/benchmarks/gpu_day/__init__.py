"""What waits for a GPU, cut into items that fit into minutes."""

import time

STARTED = time.monotonic()
"""When this process began, before torch and Lightning were imported: the minutes of a call count from here."""
