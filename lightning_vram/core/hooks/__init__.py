"""Saved-tensor hooks and dispatch modes: one pipeline for saved tensors, and how to step aside where hooks may not act.

Autograd gives a saved tensor to the innermost hooks only, so two techniques with hooks of their own would hide each
other. Stages derive from :class:`SavedTensorStage`: the innermost stage passes what it keeps to the next one outside of
it. Drop what can be recomputed, then compress the rest, then move it off the device. Nested ``with`` blocks are the
chain.

``torch.func`` transforms refuse to run while saved-tensor hooks are set; inside of them nothing would be packed anyway.
In a backward, some formulas of autograd (``prod``, ``cumprod``) round differently under any dispatch mode, and there is
nothing to record. PyTorch has no hook for either: :class:`stepping_aside` replaces the functions through which both
pass, and these ask their thread whether there is anything to take off.

May import: core.tensors and its neighbours, memory.
"""
