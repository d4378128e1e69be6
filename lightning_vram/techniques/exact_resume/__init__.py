"""A plain DataLoader that knows its position, so that a run resumes with the next batch. May import: core, memory."""

from lightning_vram.techniques.exact_resume.loaders import (
    can_be_stateful,
    load_loader_state,
    loader_state,
    make_stateful,
    remove_state,
    share_generators,
)

__all__ = ["can_be_stateful", "load_loader_state", "loader_state", "make_stateful", "remove_state", "share_generators"]
