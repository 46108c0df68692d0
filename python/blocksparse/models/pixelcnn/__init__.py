"""PixelCNN++ with dense or block-sparse convolutions: models of images, which say how likely one is, and draw.

config                     what a model is made of, and how it is trained
architecture, layouts      which convolutions there are; how their channels are connected
weights, network           the convolutions with weight norm; the model of them
elementwise                what lies between convolutions, compiled on a card
likelihood                 what a model's outputs say of a byte
training, adam, captured   an update; Adam; forward and backward as one CUDA graph
sampling                   images drawn, computing what each new pixel needs
data                       images of files
options, command, train_command   the command line

Nothing is imported here, so that help comes without PyTorch.
"""
