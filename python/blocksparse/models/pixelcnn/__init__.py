"""PixelCNN++ with dense or block-sparse convolutions: models of images that say how likely each one is, and draw them."""
