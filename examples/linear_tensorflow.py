"""A block-sparse product of TensorFlow, trained in a function, saved and loaded."""

import sys
import tempfile

import numpy as np

# [readme]
import tensorflow as tf

import blocksparse.tensorflow as bstf
from blocksparse import graphs

layout = graphs.barabasi_albert(32, 4, block_size=32, seed=0)  # 1024 x 1024, a quarter of the blocks


class Model(tf.Module):
    def __init__(self):
        self.values = tf.Variable(0.05 * tf.random.normal(layout.values_shape))
        self.bias = tf.Variable(tf.zeros([layout.out_features]))

    @tf.function(input_signature=[tf.TensorSpec([None, layout.in_features])])
    def __call__(self, x):
        return bstf.linear(x, self.values, layout, self.bias, activation="relu")


model = Model()
x = tf.random.normal([64, layout.in_features])
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(model(x) ** 2)
gradients = tape.gradient(loss, model.trainable_variables)  # [blocks, 32, 32] and [1024]
# [readme]

for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
    variable.assign_sub(10 * gradient)
print(f"loss {float(loss):.3f} -> {float(tf.reduce_mean(model(x) ** 2)):.3f}")
with tempfile.TemporaryDirectory() as folder:
    tf.saved_model.save(model, folder)
    if not np.array_equal(tf.saved_model.load(folder)(x), model(x)):
        sys.exit("the loaded model computes something else")
