"""In which precision it computes: the mixed-precision plugin, and what only it needs."""
