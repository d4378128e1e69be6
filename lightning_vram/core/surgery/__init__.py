"""Swap an object's class, shadow a method, hold a process-wide setting; each with an undo. May import: memory."""
