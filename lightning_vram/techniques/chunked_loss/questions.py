"""What a tensor can answer without its values, and what writes to it, by the names of torch's functions."""

from lightning_vram.private_names.torch.tensors import VIEW_PROPERTIES

PROPERTIES = VIEW_PROPERTIES | {
    *("shape", "dtype", "device", "ndim", "layout", "names", "is_leaf", "requires_grad", "grad_fn"),
    *("retains_grad", "output_nr", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta"),
    *("is_mtia", "is_ipu", "is_maia", "is_vulkan", "is_mkldnn", "is_sparse", "is_sparse_csr", "is_nested"),
    "is_quantized",
}
QUESTIONS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size"),
    *("is_floating_point", "is_complex", "is_signed", "is_same_size", "storage_offset", "get_device", "is_conj"),
    *("is_neg", "is_inference", "__len__"),
}
IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__set__"})
