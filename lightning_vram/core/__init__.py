"""What several techniques share. Knows torch, not Lightning, and no technique.

From top to bottom: ``rollback``, ``module_state``, ``processes``, ``ranks``, ``recomputed_saves``, ``hooks`` and
``random_state``, and below these ``tensors``, ``operators``, ``patching``, ``layers``, ``gradients``, ``batches`` and
``host``, which do not import one another. A new module must be added to the contract in ``pyproject.toml``.
"""
