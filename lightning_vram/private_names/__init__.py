"""Every private name of torch, Lightning and torchmetrics that the package stands on. No other folder uses one.

A port to another version begins, and mostly ends, here. One file for each part of those libraries; each begins with
its names, a line for each: what it is for | the versions it was seen in | what happens without it. Versions are those
of torch in ``torch/``, ``cuda/`` and ``fsdp2/``, of Lightning in ``lightning/``, of torchmetrics in
``lightning/metrics.py``; ``2.13 -`` means from 2.13 on, ``- 2.13`` up to 2.13. The tests read these lines: a name that
is used and not listed fails, and so does one that is listed and not there, in a version in which it should be.
"""
