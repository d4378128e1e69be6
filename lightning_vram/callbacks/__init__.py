"""When to do it: one Lightning callback per folder, each a thin adapter over techniques and measurements."""
