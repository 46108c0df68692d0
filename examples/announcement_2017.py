"""The program of the announcement of 2017, on TensorFlow of today: only the import of TensorFlow is another."""

# ruff: noqa: I001
from blocksparse.matmul import BlocksparseMatMul
import tensorflow.compat.v1 as tf
import numpy as np

tf.disable_eager_execution()

hidden_size = 4096
block_size = 32
minibatch_size = 64

# Which blocks there are, at random: half of them.
sparsity = np.random.randint(2, size=(hidden_size // block_size, hidden_size // block_size))

# The product with such a weight.
bsmm = BlocksparseMatMul(sparsity, block_size=block_size)

# Input of the graph, and the weights.
x = tf.placeholder(tf.float32, shape=[None, hidden_size])
w = tf.get_variable("w", bsmm.w_shape, dtype=tf.float32)

y = bsmm(x, w)

sess = tf.InteractiveSession()
sess.run(tf.global_variables_initializer())
result = sess.run([y], feed_dict={x: np.ones((minibatch_size, hidden_size), dtype="float32")})
print(result)
