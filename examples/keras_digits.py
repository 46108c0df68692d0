"""Handwritten digits by block-sparse layers of Keras, pruned while they are fitted; KERAS_BACKEND picks the backend."""

import keras
from sklearn.datasets import load_digits

# [readme]
import blocksparse.keras as bsk

model = keras.Sequential(
    [
        keras.Input((64,)),
        bsk.BlockSparseDense(512, density=0.5, block_size=32, activation="relu"),  # half of its blocks, drawn once
        bsk.BlockSparseDense(512, density=1.0, block_size=32, activation="relu", gates=True),  # all, to be pruned
        keras.layers.Dense(10),
    ]
)
schedule = bsk.PolynomialDecay(final_sparsity=0.9, begin_step=40, end_step=300, frequency=20)
# [readme]

keras.utils.set_random_seed(0)
images, digits = load_digits(return_X_y=True)
images = images / 16
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(images[:1400], digits[:1400], batch_size=32, epochs=8, verbose=0, callbacks=[bsk.PruneBlocks(schedule)])
small = bsk.strip_pruning(model)  # the blocks that are left, and the same results
small.compile(loss=model.loss, metrics=["accuracy"])
_, accuracy = small.evaluate(images[1400:], digits[1400:], verbose=0)
print(f"{model.layers[1].sparsity:.0%} of the second layer pruned, {model.count_params()} -> {small.count_params()}")
print(f"accuracy on the last 397: {accuracy:.1%}")
