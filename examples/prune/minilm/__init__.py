"""The parts of the pruning example: text, model, training, measurements, report."""
