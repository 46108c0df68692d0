"""Training a block-sparse model whose blocks change their places; their number stays.

- `rewiring`: begin here; what all methods share, and what they do at each step
- `set`, `rigl`: a method each
- `rewired_layer`: a layer whose blocks change their places
- `exchange`: which blocks go and which come, and `CosineDrop`, which says how many
- `grow_scores`: how much the loss would change with blocks that are not there
"""
