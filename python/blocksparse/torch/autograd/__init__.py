"""Gradients of the ops, and sequences of steps as one node of autograd."""
