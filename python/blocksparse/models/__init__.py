"""Whole models, each a package that trains and runs by a command line.

language    bytes of text through a small-world LSTM; lossless compression by what it expects
sentiment   what a language model knows of a text, and linear classifiers on it
pixelcnn    images by a PixelCNN++

What their programs share:

trainer, loop           weights, averages and moments on their way; updates to the end, with checkpoints and evaluations
checkpoint, log         what a training writes
folder, files           a folder of one process at a time; files that are complete or not there
running                 what any `train` command does around a training
config_options          options of a command for the fields of a configuration
bars, stopping          progress; Ctrl-C and SIGTERM
distributed, memory     several processes; errors where memory is short
images                  images of files of many kinds

`moved` has old addresses of modules, which work for one release.
"""

__path__ += [f"{folder}/moved" for folder in __path__]
