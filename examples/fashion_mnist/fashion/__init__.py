"""A small residual network, dense and block-sparse: its data, its arms and its pictures."""
