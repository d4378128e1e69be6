"""What is measured, a file for each: ``SETTINGS``, what ``--quick`` makes of them, and ``measure(options)``."""

SUITES: dict[str, tuple[str, ...]] = {
    "memory": ("memory",),
    "speed": ("speed",),
    "biggest": ("biggest",),
    "optimizers": ("optimizers",),
    "losses": ("head_loss",),
    "offload": ("strategies", "fsdp_offload", "host_adamw", "offload_overlap", "disk_states"),
    "estimate": ("estimate", "estimate_cost", "tokens"),
    "plan": ("plan", "plan_cost"),
    "precision": ("mixed_precision",),
    "batches": ("micro_batching",),
    "price": ("nothing", "python_price", "recomputation", "early_release", "leak_detector"),
    "errors": ("abn_errors", "compression_errors"),
    "networks": ("networks",),
    "slurm": ("slurm_requeue",),
}
"""Names of modules; a part that comes later adds its rows to one of them, or its own module."""

MEASUREMENTS = tuple(dict.fromkeys(name for names in SUITES.values() for name in names))
