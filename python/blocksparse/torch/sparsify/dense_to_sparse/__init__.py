"""Training a dense model that becomes sparse: blocks go, and some come back, until an exact number is left.

- `pruner`: begin here; a pruner's life, from `prepare` to `convert`
- `steps`: what it does at each step of the optimizer, and what a method overrides
- `magnitude`, `lasso`, `l0`, `blast`: a method each
- `gating`: multiplies weights by L0's gates while a module runs
- `regrowth`: the optimizer's moments of blocks that come back
- `checkpoint`: `state_dict` and `load_state_dict`
"""
