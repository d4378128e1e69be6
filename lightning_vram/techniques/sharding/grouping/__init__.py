"""Which modules are gathered together. May import: core, memory."""

from lightning_vram.techniques.sharding.grouping.plan import ShardingPlan, plan_sharding_groups

__all__ = ["ShardingPlan", "plan_sharding_groups"]
