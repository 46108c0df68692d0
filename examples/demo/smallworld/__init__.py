"""The parts of the demo, in the order of use: data, model, arms, train, speed, store, report."""
