"""Private names of torch: tensors, modules, autograd, autocast, optimizers and data loaders."""
