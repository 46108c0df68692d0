"""Whole models. `language`: bytes of text through a small-world LSTM. `pixelcnn`: images by a PixelCNN++."""
