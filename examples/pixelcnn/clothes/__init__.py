"""A dense and a block-sparse PixelCNN++ that learn to draw clothes."""
