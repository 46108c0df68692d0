"""The ops as JAX sees them: primitives, their rules, and XLA's custom calls below."""
