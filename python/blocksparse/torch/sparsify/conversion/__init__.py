"""From weights with zeros in them to block-sparse layers.

- `convert`: after the training, where it is measured faster
- `compact`: in mid-training, with the optimizer's state
- `storage`: makes the block-sparse layer of a dense one
- `mlps`: feed-forward parts of transformers as one module
- `timing`: what layers are fed, and how long they take
- `layer_times`: times of pruned layers, for a report
"""
