"""What is known of PyTorch's operators: which are cheap, which write, what they cost, which arguments must be exact.

Cost is counted in FLOP equivalents: a kernel is as slow as the slower of its arithmetic and its memory traffic, and a
byte of traffic is worth :data:`BALANCE` FLOPs. So an activation over a large tensor is not free, and a matrix product
of a thin matrix costs what reading it costs. The numbers rank operators of one model; they are not times. They ignore
what kernels share in caches, and the latency of launches, which dominates where tensors are tiny. Costly operators are
the matrix products, convolutions and recurrent kernels (:data:`MATMULS`) and the attention kernels (:data:`ATTENTION`):
much arithmetic for few bytes of result. Names that this torch does not have do no harm.

Cheap (:func:`family_of`) means: no matrix product, no convolution, no attention, no random numbers, and the same kernel
gives the same bits from the same inputs. PyTorch tags its elementwise operators itself; the others are listed here.

Some backwards magnify an error in a saved argument or result (:func:`exact_arguments`): it is divided by, taken the
logarithm of, exponentiated, compared for equality with a result (no match: 0 / 0), or its sign decides. The formulas
are those of PyTorch's ``derivatives.yaml``. Not listed: activations that branch on a sign, such as leaky ReLU, of which
few elements are near the step, and products, norms and attention, whose error is in proportion to that of the argument.

May import: memory.
"""
