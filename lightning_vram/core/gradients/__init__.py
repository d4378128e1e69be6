"""Scale, clip, average and reduce gradients, also sparse and sharded ones. May import: memory.

:func:`reduce_gradients` does by hand what ``DistributedDataParallel`` does between ranks. A backward that may run out
of memory must not reduce anything: the other ranks would wait for the rest. So it runs under ``ddp.no_sync()``, with
the buffers broadcast before, and the gradients are averaged when all ranks have finished. The result has the same bits
as the reducer's with two ranks, with more up to the order of the sum. Nothing overlaps with the backward, so it costs
the time of sending all gradients, and memory for two buckets.
"""
