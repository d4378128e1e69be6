"""What several techniques share, room by room. Knows torch, not Lightning, and no technique.

From top to bottom: ``rollback`` and ``processes``; ``hooks`` and ``random_state``; then ``tensors``, ``operators``,
``surgery``, ``layers``, ``gradients``, ``batches`` and ``host``, which do not know one another. A new room has to be
named in the import contracts of pyproject.toml.
"""
