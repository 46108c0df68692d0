"""Which weights of a model are made sparse, and how their blocks are described.

- `targets`: finds weights, and sees each as a matrix of blocks, whatever module holds it
- `masks`: which blocks are live; choosing them by scores, checking masks, `torch.sparse_bsr`
- `norms`: norms of blocks
- `densities`: how dense each layer is, for a density of the whole model
- `masked_layer`: the gates beside a weight, and which pruner it belongs to
"""
