"""PixelCNN++ with dense or block-sparse convolutions: models of images, which say how likely one is, and draw."""
