"""A simulated accelerator: its memory is host memory, its kernels are the CPU's, its streams are hostile (README.md).

``import support.simdevice.register``, then there are ``device="sim"``, ``torch.sim`` and ``torch.accelerator``.
"""
