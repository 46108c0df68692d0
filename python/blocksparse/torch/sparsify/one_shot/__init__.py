"""A trained model made sparse at once, without training.

- `sparsify`: begin here; `sparsify_` goes through a model part by part
- `scores`: Wanda's and block OBS's scores, and the refit of what stays
- `layer_inputs`: what a layer multiplies with its weights, as rows
"""
