"""A dense network is pruned in blocks while it is trained, converted, saved and loaded."""

# [readme]
import torch

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512))


model = build()
pruner = bss.MagnitudePruner(
    bss.PolynomialDecay(final_sparsity=0.9, begin_step=10, end_step=60, frequency=5), block_size=32
)
pruner.prepare(model)  # in place: parameters stay what they are
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
pruner.attach(optimizer)  # steps behind optimizer.step()
for _ in range(80):
    x = torch.randn(64, 512)
    loss = torch.nn.functional.mse_loss(model(x), x.roll(1, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(pruner.report())  # per layer: sparsity, density, share of the norm kept, time now and expected
model = pruner.convert(model)  # BlockSparseLinear where it is measured faster on this device
bst.save_pretrained(model, "small.safetensors")
model = bst.load_pretrained(build, "small.safetensors")
# [readme]

masks = pruner.masks()
assert masks == {}, "the pruner has ended"
live = [int((bss.block_norms(layer.weight, 32) > 0).sum()) for layer in model if isinstance(layer, torch.nn.Linear)]
live += [layer.layout.blocks for layer in model if isinstance(layer, bst.BlockSparseLinear)]
assert live == [51, 51], live
print(f"loss {loss.item():.3f}")
