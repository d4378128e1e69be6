"""Restore the state of a module before a forward or a step, for recomputation and for retries.

The attributes of a module are restored in the very objects that held them, since other code holds on to these: the
handle of a hook refers to the dict it is in, a logger to the list it reads. So lists, dicts and the like (also nested
ones) get their former content back. Generators of torch, NumPy and Python go back to their positions, in containers as
well. Of containers with more than a thousand items nothing inside is checked, as that would cost too much: from lists
and dicts only what was added at the end is removed, sets and deques get their items back up to ten thousand, and larger
ones stay as they are. Not detected: objects of other kinds that change inside.

Most bytes of buffers are constants (masks, rotary tables): autograd counts writes, so a constant is copied once. Up to
1 MiB is copied in every step all the same, in one operation for all tensors of a kind: kernels such as those of batch
normalization write without being counted. A large tensor that is written uncounted is found in the second step, when
all of them are compared once, and copied in every step from then on. Copies of large tensors are on the host, those of
written ones in pinned memory, so that nothing blocks.

May import: the rooms of core below it, memory.
"""
