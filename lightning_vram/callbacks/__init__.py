"""When to do it: one Lightning callback per file, each a thin adapter over techniques and measurements."""
