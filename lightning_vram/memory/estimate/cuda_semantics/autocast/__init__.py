"""Autocast of CUDA without CUDA: what is cast, the casts, and ``torch.autocast`` that can be entered."""
