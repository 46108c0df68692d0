"""The ops on arrays: what NumPy and CuPy share, and what each does its own way."""
