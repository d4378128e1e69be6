"""Host memory, host-device copies that overlap with computation, unnamed files, threads. May import: memory."""
