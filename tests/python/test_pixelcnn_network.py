"""PixelCNN++: what it sees, what it is made of, and that its sparse convolutions are masked dense ones."""

import gc
import re
import weakref
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import blocksparse.torch as bst  # noqa: E402
from blocksparse import Layout  # noqa: E402
from blocksparse.models.pixelcnn import elementwise, layouts, network  # noqa: E402
from blocksparse.models.pixelcnn.architecture import architecture_of, count, table_macs, table_weights  # noqa: E402
from blocksparse.models.pixelcnn.config import PRESETS, ModelConfig, TrainConfig  # noqa: E402
from blocksparse.models.pixelcnn.network import PixelCNN, Whole  # noqa: E402
from blocksparse.models.pixelcnn.weights import Convolutions  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIGS = {
    "dense": ModelConfig(3, 16, 1, 1),
    "diagonal": ModelConfig(3, 32, 1, 2, "diagonal", 2, 8),
    "nin": ModelConfig(1, 16, 1, 2, "diagonal", 2, 8, dense_nin=True),
    "balanced": ModelConfig(3, 32, 1, 1, "balanced", 2, 16),
    "ba": ModelConfig(1, 32, 1, 2, "ba(4,1)", 1, 8),
    "ws": ModelConfig(3, 40, 1, 1, "ws(5,2,0.3)", 1, 8),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def some_images(config, size=(6, 7), n=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, config.channels, *size, generator=generator) * 2 - 1


def ready(config, **more):
    """A model whose gains and biases are set, without dropout."""
    model = PixelCNN(replace(config, **more)).eval()
    model.initialise(some_images(config, n=4, seed=1))
    return model


@every_config
def test_a_pixel_changes_nothing_at_or_before_it(config):
    """Bit for bit; and almost everything behind it, so that it is seen."""
    model, x = ready(config), some_images(config)
    height, width = x.shape[2:]
    with torch.no_grad():
        before = model(x)
        for i, j in ((0, 0), (0, width - 1), (2, 3), (3, 2), (height - 1, 0), (height - 1, width - 1)):
            other = x.clone()
            other[:, :, i, j] = 0.123
            changed = (model(other) != before).any(1).flatten(1)
            place = i * width + j
            assert not bool(changed[:, : place + 1].any()), (i, j)
            behind = changed[:, place + 1 :].float()
            assert behind.numel() == 0 or float(behind.mean()) > 0.5, (i, j)


@every_config
def test_initialised_outputs_have_mean_0_and_the_deviation_of_their_kind(config, monkeypatch):
    model, x = ready(config), some_images(config, n=4, seed=1)
    conv, seen = Whole.conv, []

    def and_look(self, layer, y):
        made = conv(self, layer, y)
        variance, mean = torch.var_mean(made, (0, 2, 3), correction=0)
        seen.append(layer)
        torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-4)
        torch.testing.assert_close(variance, torch.full_like(variance, layer.kind.scale**2), rtol=1e-3, atol=1e-6)
        return made

    monkeypatch.setattr(Whole, "conv", and_look)
    with torch.no_grad():
        model(x)
    assert sorted(map(str, seen)) == sorted(map(str, model.plan.layers()))


# ---- Sparse and dense ------------------------------------------------------------------------------------------------


def as_dense(stack, weights):
    """Filters [out, in, height, width] from blocks, differentiably, in the order of x."""
    made = []
    for i, w in enumerate(weights):
        layout = stack.layouts[i % len(stack.layouts)]
        dense = bst.to_dense(w, layout, kernel_size=stack.kind.kernel)
        made.append(dense if stack.order is None else dense[:, stack.order.long().argsort()])
    return made


@every_config
def test_a_sparse_model_is_a_masked_dense_one(config):
    sparse = ready(config).double()
    plain = PixelCNN(replace(config, layout="", groups=1)).eval().double()
    x = some_images(config).double()
    results = []
    for model in (sparse, plain):
        weights = sparse.weights()
        if model is plain:
            for name, stack in sparse.convolutions.items():
                weights[name] = as_dense(stack, weights[name]) if stack.layouts else weights[name]
                model.stack_of(name).bias.data.copy_(stack.bias.data)
        given = x.clone().requires_grad_()
        y = model.run(Whole(model, weights), given)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
        parameters = [p for name, p in sparse.named_parameters() if not name.endswith("bias")]
        results.append([y, *torch.autograd.grad(y, [given, *parameters], dy)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


class Shuffling(Whole):
    """Shuffles each part of what a sparse convolution reads: c -> (c mod g)(F / g) + c div g."""

    def conv(self, layer, x):
        c, name, stack = self.model.config, layer.kind.name, self.model.stack(layer)
        if stack.order is None:
            return super().conv(layer, x)
        goes_to = torch.tensor([(i % c.groups) * (c.filters // c.groups) + i // c.groups for i in range(c.filters)])
        parts = [torch.empty_like(part).index_copy_(1, goes_to, part) for part in x.split(c.filters, 1)]
        made = self.weights[name][layer.index], self.biases[name][layer.index]
        return stack(
            torch.cat(parts, 1).contiguous(memory_format=torch.channels_last), *made, layer.index, orders=False
        )


@pytest.mark.parametrize("groups", [2, 4])
def test_the_shuffle_in_the_order_of_channels_is_one_in_front(groups):
    config = ModelConfig(3, 32, 1, 2, "diagonal", groups, 8)
    model, x = ready(config), some_images(config)
    with torch.no_grad():
        expected = model.run(Shuffling(model, model.weights()), x)
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
    assert any(stack.order is not None for stack in model.convolutions.values())


def test_groups_pair_a_channel_with_its_negative():
    config = ModelConfig(3, 32, 1, 2, "diagonal", 2, 8)
    kind = next(kind for kind in architecture_of(config).kinds if kind.name == "ul_nin_2")
    (layout,) = layouts.layouts_of(config, kind, 3, 0)
    order = layouts.order_of(config, kind).long()
    sees = torch.from_numpy(layout.mask()).repeat_interleave(8, 0).repeat_interleave(8, 1)[:, order.argsort()]
    halves = sees.view(32, 4, 32)  # u and the skip, then both negative
    assert bool((halves == halves[:, :1]).all())
    assert sees.sum(1).tolist() == [64] * 32


def test_weight_norm_of_a_ragged_graph():
    layout = Layout.from_graph("ba(4,1)", 8, seed=3)
    kind = architecture_of(ModelConfig(1, 32, 1, 1, "ba(4,1)", 1, 8)).u.halve[0].kind
    stack = Convolutions(kind, 2, [layout])
    with torch.no_grad():
        stack.gain.copy_(torch.rand(2, 32) + 0.5)
    for i, w in enumerate(stack.weights()):
        layer = bst.BlockSparseConv2d(32, 32, kind.kernel, layout, bias=False)
        with torch.no_grad():
            layer.weight.copy_(stack.v[i])
        bst.weight_norm(layer)
        with torch.no_grad():
            layer.parametrizations.weight.original0.copy_(stack.gain[i])
        torch.testing.assert_close(w, layer.weight)


def test_outputs_without_blocks_are_their_bias():
    config = ModelConfig(1, 32, 1, 1, "random(4,4,0.25)", 1, 8)
    model = PixelCNN(config)
    degrees = [layout.mask().sum(1).min() for stack in model.convolutions.values() for layout in stack.layouts]
    assert min(degrees) == 0
    model.initialise(some_images(config))
    y = model(some_images(config))
    assert bool(y.isfinite().all())
    gradients = torch.autograd.grad(y.sum(), list(model.parameters()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


# ---- What lies between convolutions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "diagonal", "balanced"])
def test_the_operations_of_a_card_give_the_same(name, monkeypatch):
    """Without compiling them, which changes nothing but their speed."""
    config = replace(CONFIGS[name], dropout=0.0)
    model, x = ready(config).train(), some_images(config)
    results = []
    for fused in (False, True):
        monkeypatch.setattr(elementwise, "_compiled", lambda function, *given: function(*given))
        for module in (network, elementwise):
            monkeypatch.setattr(module, "is_fused", lambda x, fused=fused: fused)
        y = model(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))])
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4 * float(plain.detach().abs().max()))


def test_networks_of_many_sizes_are_compiled_in_one_process(monkeypatch):
    """PyTorch compiles a function 8 times and then refuses; a dense network alone has nine sizes and pads of one."""
    monkeypatch.setattr(elementwise, "BACKEND", "eager")
    for module in (network, elementwise):
        monkeypatch.setattr(module, "is_fused", lambda x: True)
    elementwise._compiled_for.cache_clear()
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    with torch._dynamo.config.patch({limit: 1}):  # so that whatever is compiled twice fails
        model = PixelCNN(ModelConfig(1, 16, 1, 1, "diagonal", 2, 8))
        model(some_images(CONFIGS["nin"], (6, 7))).sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
        dense = PixelCNN(ModelConfig(1, 8))
        first, second = (dense.stack_of(name) for name in ("u_1", "ul_1"))
        for x in (torch.randn(2, 8, 8, 4), torch.randn(2, 8, 4, 2)):
            for stack in (first, second):
                height, width = stack.elu((x,))[0].shape[2:]
                left, right, above, below = stack.kind.pads
                assert (height, width) == (x.size(2) + above + below, x.size(3) + left + right)
    elementwise._compiled_for.cache_clear()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_leaves_nothing_behind(fused, monkeypatch):
    """What a step has seen goes with it, before Python looks for cycles: it is most of a card's memory."""
    monkeypatch.setattr(elementwise, "_compiled", lambda function, *given: function(*given))
    for module in (network, elementwise):
        monkeypatch.setattr(module, "is_fused", lambda x: fused)
    seen, kept_up = [], network.Kept.__init__

    def and_look(self):
        kept_up(self)
        seen.append(weakref.ref(self))

    monkeypatch.setattr(network.Kept, "__init__", and_look)
    model = PixelCNN(CONFIGS["nin"]).train()
    gc.collect()
    gc.disable()
    try:
        model(some_images(CONFIGS["nin"])).sum().backward()
        assert [kept() for kept in seen] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [1, 2])
def test_dropout_of_a_card_leaves_out_what_it_says(count, monkeypatch):
    monkeypatch.setattr(elementwise, "_compiled", lambda function, *given: function(*given))
    terms = [torch.randn(4, 16, 20, 20).requires_grad_() for _ in range(count)]
    biases = [torch.randn(16).requires_grad_() for _ in range(count)]
    places = elementwise.places_of(16, torch.randperm(32))
    y = elementwise.inner_concat_elu(tuple(terms), tuple(biases), places, 0.75, (1, 1, 1, 0))
    assert y.shape == (4, 32, 21, 22)
    inside = y[:, :, 1:, 1:-1]
    kept = inside != 0
    assert float(kept.float().mean()) == pytest.approx(0.75, abs=0.02)
    of_channels, of_pixels = kept.float().mean((0, 2, 3)), kept.float().mean((0, 1))
    assert float((of_channels - 0.75).abs().max()) < 0.06
    assert float((of_pixels - 0.75).abs().max()) < 0.2
    x = sum(terms) + sum(biases).view(-1, 1, 1)
    order = torch.stack([places.plus, places.minus]).flatten().argsort()
    expected = elementwise.concat_elu(x)[:, order] / 0.75 * kept
    torch.testing.assert_close(inside, expected)
    ours, theirs = (
        torch.autograd.grad(z.square().sum(), [*terms, *biases], retain_graph=True) for z in (inside, expected)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_dropout_of_a_card_is_another_one_each_time():
    """As rarely equal as coins, places beside one another and under other seeds; even over all seeds."""
    masks = []
    for _ in range(64):
        seeds = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)
        masks.append(elementwise._random(torch.Size((2, 16, 16, 32)), seeds) < 2**30)
    masks = torch.stack(masks).float()
    size = masks[0].numel() ** 0.5
    assert float((masks.mean((1, 2, 3, 4)) - 0.5).abs().max()) < 2.5 / size
    flat = masks.flatten(1) * 2 - 1
    for apart in (1, 2, 32, 512, 8192):  # channels, columns, rows, images
        assert float((flat[:, apart:] * flat[:, :-apart]).mean(1).abs().max()) < 5 / size
    alike = flat @ flat.T / flat.size(1) - torch.eye(64)
    assert float(alike.abs().max()) < 5 / size


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 1.1 * 2**-8), (torch.float16, 1.1 * 2**-11), (torch.float32, 2**-22)]
)
def test_elu_is_as_exact_as_its_type(dtype, most):
    """Beside float64. Of 16 bits hardly more than their rounding is lost."""
    v = torch.cat((-torch.logspace(-4, 2, 20001), torch.linspace(-3, 3, 20001))).to(dtype).float()
    found, expected = elementwise._elu(v, dtype).to(dtype).double(), torch.nn.functional.elu(v.double())
    assert float(((found - expected).abs() / expected.abs().clamp(min=1e-4)).max()) < most


@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 1, 1, 0)])
def test_what_is_compiled_for_a_card_gives_the_same(pads, monkeypatch):
    """By the compiler for the CPU: the same program, but for its last step."""
    pytest.importorskip("torch._inductor")
    results = []
    for compiles in (False, True):
        if not compiles:
            monkeypatch.setattr(elementwise, "_compiled", lambda function, *given: function(*given))
        else:
            monkeypatch.undo()
        torch.manual_seed(0)
        x, aux, bias, both_bias = torch.randn(2, 8, 4, 5), torch.randn(2, 8, 4, 5), torch.randn(8), torch.randn(16)
        given = [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in (x, aux, bias, both_bias)]
        x, aux, bias, both_bias = (t.requires_grad_() for t in given)
        elu, again, passed = elementwise.ordered_concat_elu((x,), elementwise.places_of(8, torch.randperm(16)), pads)
        two, *_ = elementwise.ordered_concat_elu((x, aux), elementwise.places_of(16, torch.randperm(32)), pads)
        inner = elementwise.inner_concat_elu(
            (x, aux), (bias, bias), elementwise.places_of(8, torch.randperm(16)), 0.5, pads
        )
        y = elementwise.biased_gate(passed, inner[..., :4, :5], both_bias)
        loss = y.square().sum() + elu.sum() + again.square().sum() + two.square().sum()
        results.append([y, *torch.autograd.grad(loss, given)])
    elementwise._compiled_for.cache_clear()
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


# ---- Counts and configurations ---------------------------------------------------------------------------------------

TABLE = {  # millions of weights, thousand millions of multiply-adds in resnets
    "160-5-dense": (53.6, 24.2),
    "160-5-x2": (53.1, 24.2),
    "160-5-x4": (52.8, 24.2),
    "160-5-x4-nin": (62.9, 28.9),
    "128-2-dense": (15.4, 7.0),
    "128-2-x2": (15.1, 7.0),
    "128-2-x4": (14.9, 7.0),
    "128-2-x4-nin": (17.9, 8.5),
    "128-2-x4-balanced": (14.9, 7.0),
    "96-3-dense": (12.2, 5.5),
    "96-3-x2": (12.0, 5.5),
    "96-3-x4": (11.9, 5.5),
    "96-3-x4-nin": (14.3, 6.6),
    "64-2-dense": (3.9, 1.76),
    "64-2-x2": (3.8, 1.76),
    "64-2-x4": (3.7, 1.76),
    "32-1-dense": (0.57, 0.26),
    "32-1-x2": (0.55, 0.26),
    "32-1-x4": (0.54, 0.26),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_count_as_in_the_table(name):
    config = PRESETS[name]
    weights, macs = TABLE[name]
    counts = count(config, layouts.density_of(config))
    assert counts.weights / 1e6 == pytest.approx(weights, abs=0.06 if weights > 1 else 0.006)
    if not config.dense_nin:
        assert counts.weights == table_weights(config)
        around = counts.macs - table_macs(config)  # first and last layers, and those between levels
        assert 0 < around < 0.07 * counts.macs
        assert table_macs(config) / 1e9 == pytest.approx(macs, abs=0.06 if macs > 2 else 0.006)
    else:
        assert counts.macs / 1e9 == pytest.approx(macs, abs=0.13)


@pytest.mark.parametrize("name", ["32-1-dense", "32-1-x2", "32-1-x4", "64-2-x4"])
def test_models_have_the_parameters_that_are_counted(name):
    config = PRESETS[name]
    model = PixelCNN(config)
    assert sum(p.numel() for p in model.parameters()) == count(config, layouts.density_of(config)).parameters
    weights = sum(stack.v.numel() for stack in model.convolutions.values())
    assert weights == table_weights(config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"filters": 40, "layout": "diagonal", "groups": 2, "block": 8}, "needs a multiple of groups * block = 16"),
        ({"filters": 40, "layout": "ba(5,1)", "block": 16}, "needs a multiple of block = 16"),
        ({"filters": 64, "layout": "balanced", "groups": 3, "block": 16}, "needs a multiple of groups = 3"),
        ({"filters": 64, "layout": "ba(4,1)", "groups": 2, "block": 16}, "needs 1: ba(4,1) says what is connected"),
        ({"groups": 2}, "groups is 2, needs 1 for a dense model, or a layout"),
        ({"channels": 4}, "channels is 4, needs 3 or 1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"block": 12, "layout": "balanced"}, "block is 12, needs 8, 16"),
        ({"depth": 0}, "depth is 0, needs 1 or more"),
        ({"filters": 2**64}, "filters is 18446744073709551616, needs 2147483647 or less"),
        ({"seed": 2**70}, "needs 64 bits or less"),
    ],
)
def test_configurations_that_make_no_model(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig(**given)


def test_layouts_that_are_none():
    with pytest.raises(ValueError, match="nonsense"):
        PixelCNN(ModelConfig(3, 32, 1, 1, "nonsense(4)", 1, 8))
    with pytest.raises(ValueError, match=r"a graph of filters / block = 1 nodes: "):  # of which there is no "ba"
        PixelCNN(ModelConfig(3, 32, 1, 1, "nonsense(4)", 1, 32))
    with pytest.raises(ValueError, match=r"is of 5 x 5 blocks, needs filters / block = 4"):
        PixelCNN(ModelConfig(3, 32, 1, 1, "ba(5,1)", 1, 8))


def test_trainings_that_are_none():
    for given, message in (
        ({"batch": 6, "accumulate": 4}, "multiple of accumulate = 4"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"ema": 1.0}, "ema 1.0"),
        ({"updates": 0}, "updates is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(**given)


def test_images_of_other_channels_are_refused():
    model = PixelCNN(CONFIGS["nin"])
    with pytest.raises(ValueError, match=r"images are \[1, 3, 4, 4\], needs \[n, 1, height, width\]"):
        model(torch.zeros(1, 3, 4, 4))
