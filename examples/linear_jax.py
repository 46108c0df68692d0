"""A block-sparse layer in a JAX program: compiled, differentiated, trained."""

# [readme]
import jax
import jax.numpy as jnp

import blocksparse.jax as bsj
from blocksparse import graphs

layout = graphs.barabasi_albert(nodes=64, links=4, block_size=16, seed=0)  # 1024 x 1024, 13.6 % of the blocks
keys = jax.random.split(jax.random.key(0), 4)
params = {
    "hidden": bsj.initializers.lecun_normal(layout)(keys[0], layout.values_shape),  # [blocks, 16, 16]
    "output": jax.random.normal(keys[1], (1024, 10)) / 32,
}
x, target = jax.random.normal(keys[2], (256, 1024)), jax.random.randint(keys[3], (256,), 0, 10)


@jax.jit
def step(params):
    def loss_of(params):
        hidden = bsj.linear(x, params["hidden"], layout, activation="gelu")
        return -jax.nn.log_softmax(hidden @ params["output"])[jnp.arange(256), target].mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)  # gradients of the live blocks alone
    return loss, jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)


for _ in range(20):
    loss, params = step(params)
# [readme]

print(layout)
print(f"loss {loss:.3f}")
assert loss < 1.0
