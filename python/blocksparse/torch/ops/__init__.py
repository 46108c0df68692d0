"""The ops that PyTorch sees: schemas, kernels and fake kernels."""
