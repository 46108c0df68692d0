"""The convolution's PyTorch front end on a CUDA card."""

import pytest
import torch
from conftest import assert_same, make_channels
from convolutions import CONV, GEOMETRIES, SIZE, TOLERANCE, TRANSPOSED, dense_conv, error, of_rank, op_calls, to_format
from torch.library import opcheck

import blocksparse
import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.ops import conv as conv_ops

WHY_NOT = blocksparse.cuda_status() if torch.cuda.is_available() else "PyTorch sees no CUDA device"
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
DTYPES = [dtype for dtype in TOLERANCE if dtype != torch.float64]


@pytest.fixture(autouse=True)
def _ieee():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_agrees_with_dense(channels, rank, transposed, last):
    order = torch.randperm(30)
    for options in GEOMETRIES:
        options = of_rank(options, rank)
        kernel = options["kernel_size"]
        kernel = (kernel,) * rank if isinstance(kernel, int) else kernel
        taps = torch.Size(kernel).numel()
        for dtype in DTYPES:
            shapes = ((2, 30, *SIZE[:rank]), (channels.blocks, taps, 8, 8), (21,))
            x, values, bias = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
            gates = torch.rand(channels.blocks, device="cuda")
            inputs = (to_format(x, last), values, bias, gates)
            for t in inputs:
                t.requires_grad_()
            op = (TRANSPOSED if transposed else CONV)[rank - 1]
            y = op(inputs[0], values, channels, bias, gates=gates, channel_order=order.cuda(), **options)
            x64, v64, b64, g64 = (t.detach().double().cpu().requires_grad_() for t in inputs)
            w64 = bst.to_dense(v64 * g64.view(-1, 1, 1, 1), channels, kernel)
            expected = dense_conv(x64[:, order], w64, rank, options, transposed) + b64.view(-1, *(1,) * rank)
            assert error(y.cpu(), expected) < TOLERANCE[dtype], options
            dy = torch.randn_like(y)
            y.backward(dy)
            expected.backward(dy.double().cpu())
            for got, want in zip(inputs, (x64, v64, b64, g64), strict=True):
                assert error(got.grad.cpu(), want.grad) < 3 * TOLERANCE[dtype], options
            for result in (y, inputs[0].grad):
                assert to_format(result, last).stride() == result.stride()


def calls_on_cuda(layout, dtype=torch.float32):
    def moved(value):
        return value.cuda() if isinstance(value, torch.Tensor) else value

    for op, arguments, options in op_calls(layout, dtype):
        yield op, tuple(map(moved, arguments)), {key: moved(value) for key, value in options.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(channels, dtype):
    for op, arguments, options in calls_on_cuda(channels, dtype):
        opcheck(op, arguments, options)


def results_of_calls():
    """Whether the kernels are C++, then what they answer."""
    calls = calls_on_cuda(make_channels())
    return [conv_ops.CUDA_KERNELS == "C++", *(op(*arguments, **options) for op, arguments, options in calls)]


def test_python_kernels_give_the_same_bits(with_python_kernels):
    is_cpp, *theirs = with_python_kernels("test_torch_conv_cuda.results_of_calls")
    assert not is_cpp
    is_cpp, *mine = results_of_calls()
    assert is_cpp
    assert_same(mine, theirs)


def test_refuses_tensors_on_several_devices(channels):
    for op, arguments, options in calls_on_cuda(channels):
        for i, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                elsewhere = (*arguments[:i], argument.cpu(), *arguments[i + 1 :])
                with pytest.raises(ValueError, match=r"\[conv\] a tensor is on (cpu|cuda:0), needs (cpu|cuda:0)"):
                    op(*elsewhere, **options)
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                with pytest.raises(ValueError, match=r"\[conv\] a tensor is on cpu, needs cuda:0"):
                    op(*arguments, **{**options, name: value.cpu()})


def _ordered(x, order, **options):
    layout = Layout.from_graph("random(4,4,0.5)", 32, seed=1)
    generator = torch.Generator("cuda").manual_seed(3)
    values = torch.randn(layout.blocks, 9, 32, 32, device="cuda", generator=generator).to(x.dtype).requires_grad_()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = bst.conv2d(x, values, layout, kernel_size=3, padding=1, channel_order=order, **options)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad, values.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_contiguous_images_are_done_by_the_same_kernels(dtype):
    x = torch.randn(4, 128, 14, 14, device="cuda").to(dtype)
    expected = _ordered(x.to(memory_format=torch.channels_last), None)
    got = _ordered(x, None)
    assert got[0].is_contiguous()
    for given, wanted in zip(got, expected, strict=True):
        assert torch.equal(given, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_order_is_an_index_of_x(dtype):
    x = torch.randn(4, 128, 14, 14, device="cuda").to(dtype).to(memory_format=torch.channels_last)
    order = torch.randperm(128, device="cuda")
    indexed = x[:, order].contiguous(memory_format=torch.channels_last)
    y, dx, dw = _ordered(x, order)
    y_of_indexed, dx_of_indexed, dw_of_indexed = _ordered(indexed, None)
    assert error(y, y_of_indexed) < TOLERANCE[dtype]
    assert error(dx[:, order], dx_of_indexed) < TOLERANCE[dtype]
    assert error(dw, dw_of_indexed) < TOLERANCE[dtype]
    if dtype != torch.float32:
        assert torch.equal(y, y_of_indexed), "the same kernel on a copy"
        assert torch.equal(dw, dw_of_indexed)
        assert torch.equal(dx[:, order], dx_of_indexed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wrong", [-1, 128, -(1 << 31), (1 << 31) - 1, 1 << 40])
def test_entries_on_the_card_that_are_no_channels(dtype, wrong):
    """They are not seen before the call, read zeros and write nothing."""
    x = torch.randn(4, 128, 14, 14, device="cuda").to(dtype).to(memory_format=torch.channels_last)
    order = torch.randperm(128, device="cuda")
    unnamed = int(order[5])
    x[:, unnamed] = 0
    expected = _ordered(x, order)
    order[5] = wrong
    got = _ordered(x, order)
    named = torch.arange(128, device="cuda") != unnamed
    torch.cuda.synchronize()
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1][:, named], expected[1][:, named])
    assert torch.equal(got[2], expected[2])


def test_orders_from_the_cpu_are_checked():
    x = torch.randn(1, 128, 6, 6, device="cuda")
    for kind in (list, torch.tensor, lambda order: torch.tensor(order).int()):
        with pytest.raises(ValueError, match=r"channel_order\[127\] is 128, needs 0 to 127"):
            _ordered(x, kind([*range(127), 128]))
        with pytest.raises(ValueError, match="channel_order holds channel 7 twice"):
            _ordered(x, kind([*range(127), 7]))


def test_a_training_step_in_a_graph():
    """Forward and backward of a residual block, captured once and replayed with other inputs."""
    layout = Layout.from_graph("balanced(8,2)", 16)
    block = torch.nn.Sequential(
        bst.BlockSparseConv2d(128, 128, 3, layout, padding="same", activation="relu"),
        bst.BlockSparseConv2d(128, 128, 3, layout, padding="same", channel_order=torch.randperm(128)),
    ).to("cuda", torch.bfloat16)
    x = torch.randn(8, 128, 14, 14, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)

    def step():
        block.zero_grad(set_to_none=False)
        y = x + block(x)
        y.float().square().mean().backward()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [captured.clone(), *(p.grad.clone() for p in block.parameters())]
    eager = [step().detach(), *(p.grad for p in block.parameters())]
    for a, b in zip(replayed, eager, strict=True):
        assert torch.equal(a, b), "the same bits, too"


def test_compile_and_autocast(channels):
    layer = bst.BlockSparseConv2d(30, 21, 3, channels, padding=1, activation="gelu", device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 30, 6, 6, device="cuda").to(memory_format=torch.channels_last)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert error(y, layer(x)) < 2e-2
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_tf32_follows_the_setting_of_convolutions():
    layout = Layout.from_graph("dense(4)", 32)
    layer = bst.BlockSparseConv2d(128, 128, 3, layout, padding=1, bias=False, device="cuda")
    x = torch.randn(4, 128, 14, 14, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        ieee = layer(x)
        torch.backends.cudnn.allow_tf32 = True
        tf32 = layer(x)
    assert error(tf32, ieee) < 2e-3


def test_weight_norm_and_edges(channels):
    layer = bst.weight_norm(bst.BlockSparseConv2d(30, 21, 3, channels, padding="same"))
    edge = bst.EdgeBias.of(layer)
    torch.nn.init.normal_(edge.weight)
    x = torch.randn(2, 30, 6, 5)
    expected = edge(layer(x), x)
    layer.cuda()
    edge.cuda()
    torch.testing.assert_close(edge(layer(x.cuda()), x.cuda()).cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_biases_are_sums_over_many_tokens(dtype):
    """Rounded once, the same bits each time, in a graph too; of one kernel's sums and of parts."""
    unit = torch.finfo(dtype).eps
    of_sums = unit if dtype == torch.float64 else torch.finfo(torch.float32).eps
    for shape in ((3, 7, 5, 24), (16, 33, 31, 128), (2, 500, 100, 40), (9, 1000)):
        dy = (torch.rand(shape, device="cuda", dtype=torch.float64) - 0.4).to(dtype)
        found = torch.ops.blocksparse.bias_gradient(dy)
        flat = dy.double().flatten(0, -2)
        bound = unit * flat.sum(0).abs() + 16 * of_sums * flat.abs().sum(0)
        assert bool(((found.double() - flat.sum(0)).abs() <= bound).all()), shape
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = torch.ops.blocksparse.bias_gradient(dy)
        graph.replay()
        assert torch.equal(captured, found)


@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (2, 3), (3, 3)])
def test_gradients_of_small_filters_agree_with_dense(kernel):
    """Those of PixelCNN++: rows above and columns to the left."""
    layout = Layout.from_graph("random(4,8,0.3)", 32, seed=3)
    height, width = kernel
    padding = ((height - 1, 0), (width // 2, width - 1 - width // 2))
    x = torch.randn(33, 256, 16, 15, device="cuda").to(memory_format=torch.channels_last)
    values = torch.zeros(layout.blocks, height * width, 32, 32, device="cuda")
    x, values = x.bfloat16(), values.bfloat16().requires_grad_()
    y = bst.conv2d(x, values, layout, kernel_size=kernel, padding=padding)
    dy = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, values, dy, retain_graph=True)
    assert torch.equal(found, torch.autograd.grad(y, values, dy)[0])
    v64 = values.detach().double().cpu().requires_grad_()
    padded = torch.nn.functional.pad(x.double().cpu(), (*padding[1], *padding[0]))
    torch.nn.functional.conv2d(padded, bst.to_dense(v64, layout, kernel)).backward(dy.double().cpu())
    assert error(found.cpu(), v64.grad) < 3 * TOLERANCE[torch.bfloat16]
