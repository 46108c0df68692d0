import numpy as np
import pytest
import torch

from blocksparse.matmul import BlocksparseMatMul, SparseProj, group_param_grads


@pytest.fixture(params=[(axis, z) for axis in (0, 1) for z in (False, True)])
def bsmm(request):
    mask = np.random.default_rng(1).random((5, 7)) < 0.5
    axis, z_order = request.param
    return BlocksparseMatMul(mask, block_size=16, feature_axis=axis, z_order=z_order)


def dense(bsmm, w):
    full = np.zeros((bsmm.C, bsmm.K))
    for i in range(bsmm.blocks):
        c, k = bsmm.block_coord(i)
        full[c * 16 : c * 16 + 16, k * 16 : k * 16 + 16] = w[i]
    return full


def expected(bsmm, x, w):
    return x @ dense(bsmm, w) if bsmm.axis else (x.T @ dense(bsmm, w)).T


def test_the_original_conventions(bsmm):
    assert bsmm.w_shape == (bsmm.blocks, 16, 16)
    assert (bsmm.C, bsmm.K) == (80, 112)
    assert bsmm.i_shape(9) == ((9, 80) if bsmm.axis else (80, 9))
    assert bsmm.o_shape(9) == ((9, 112) if bsmm.axis else (112, 9))
    assert bsmm.g_shape == (bsmm.blocks,)
    coords = [bsmm.block_coord(i) for i in range(bsmm.blocks)]
    assert sorted(coords) == sorted(map(tuple, np.argwhere(bsmm.layout)))
    if bsmm.z_order:
        interleaved = [sum((c >> b & 1) << 2 * b | (k >> b & 1) << 2 * b + 1 for b in range(8)) for c, k in coords]
        assert interleaved == sorted(interleaved)


def test_numpy(bsmm):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(bsmm.i_shape(9)), rng.standard_normal(bsmm.w_shape)
    assert np.allclose(bsmm(x, w), expected(bsmm, x, w))
    gate = rng.random(bsmm.blocks)
    assert np.allclose(bsmm.matmul(x, w, gate=gate), expected(bsmm, x, w * gate[:, None, None]))
    assert bsmm(x, w).shape == bsmm.o_shape(9)


def test_torch_with_gradients(bsmm):
    x = torch.randn(*bsmm.i_shape(9), dtype=torch.float64, requires_grad=True)
    w = torch.randn(*bsmm.w_shape, dtype=torch.float64, requires_grad=True)
    gate = torch.rand(bsmm.blocks, dtype=torch.float64, requires_grad=True)
    y = bsmm(x, w, gate)
    scaled = (w * gate.view(-1, 1, 1)).detach().numpy()
    assert np.allclose(y.detach().numpy(), expected(bsmm, x.detach().numpy(), scaled))
    dy = torch.randn_like(y)
    y.backward(dy)
    blocks = torch.tensor([bsmm.block_coord(i) for i in range(bsmm.blocks)])
    full = (x.t() if not bsmm.axis else x).detach().t() @ (dy.t() if not bsmm.axis else dy)  # dense dW [C, K]
    s = full.view(5, 16, 7, 16).transpose(1, 2)[blocks[:, 0], blocks[:, 1]]
    torch.testing.assert_close(w.grad, s * gate.detach().view(-1, 1, 1))
    torch.testing.assert_close(gate.grad, (s * w.detach()).sum((1, 2)))
    dense_w = torch.from_numpy(dense(bsmm, scaled))
    torch.testing.assert_close(x.grad, dy @ dense_w.t() if bsmm.axis else (dy.t() @ dense_w.t()).t())


def test_identity_init():
    bsmm = BlocksparseMatMul(np.ones((3, 3)), block_size=8, feature_axis=1)
    w = bsmm.identity_init()(bsmm.w_shape)
    x = np.random.default_rng(0).standard_normal((4, 24)).astype(np.float32)
    assert np.array_equal(bsmm(x, w), x)
    assert np.array_equal(bsmm(x, bsmm.identity_init(scale=2.0)()), 2 * x)
    wide = BlocksparseMatMul(np.ones((2, 4)), block_size=8, feature_axis=1)
    w = wide.identity_init()(wide.w_shape)
    for i in range(wide.blocks):
        c, k = wide.block_coord(i)
        assert w[i].any() == (c % 4 == k % 2)


def test_says_what_is_wrong():
    with pytest.raises(ValueError, match="needs \\[C / b, K / b\\]"):
        BlocksparseMatMul(np.ones(3))
    with pytest.raises(ValueError, match="block_size is 20"):
        BlocksparseMatMul(np.ones((3, 3)), block_size=20)
    with pytest.raises(ValueError, match="feature_axis is 2"):
        BlocksparseMatMul(np.ones((3, 3)), feature_axis=2)
    with pytest.raises(ValueError, match="no block"):
        BlocksparseMatMul(np.zeros((3, 3)))
    bsmm = BlocksparseMatMul(np.ones((3, 2)), block_size=8, feature_axis=1)
    with pytest.raises(ValueError, match=r"x is \(4, 16\), needs \[N, 24\]"):
        bsmm(np.ones((4, 16)), np.ones(bsmm.w_shape))
    with pytest.raises(ValueError, match="w is"):
        bsmm(np.ones((4, 24)), np.ones((2, 8, 8)))


def test_the_axis_is_inferred_where_it_is_not_given():
    bsmm = BlocksparseMatMul(np.ones((2, 3)), 8)
    for make in (np.ones, lambda *a: torch.ones(*a, dtype=torch.float64)):
        w = make(bsmm.w_shape)
        assert tuple(bsmm(make((5, 16)), w).shape) == (5, 24)
        assert tuple(bsmm(make((16, 5)), w).shape) == (24, 5)
        assert tuple(bsmm(make((16, 5, 2)), w).shape) == (24, 5, 2)
        for shape, match in (((16, 16), "both could be the 16 features: pass feature_axis=1"), ((5, 7), "neither of")):
            with pytest.raises(ValueError, match=match):
                bsmm(make(shape), w)
    assert bsmm.i_shape(4) == (16, 4)


def test_columns_are_normalized(bsmm):
    rng = np.random.default_rng(0)
    w, gain = rng.standard_normal(bsmm.w_shape), rng.random(bsmm.K)
    full = dense(bsmm, bsmm.l2_normalize(w, gain))
    live = dense(bsmm, w).any(0)
    np.testing.assert_allclose(np.linalg.norm(full, axis=0)[live], gain[live])
    given = torch.from_numpy(w).requires_grad_()
    made = bsmm.l2_normalize(given, torch.from_numpy(gain))
    np.testing.assert_allclose(dense(bsmm, made.detach().numpy()), full)
    (made**3).sum().backward()
    assert abs(float((given.grad * given.detach()).sum())) < 1e-9  # the length of a column does not matter
    assert bsmm.l2_normalize(given, dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"gain is \(3,\), needs \(112,\)"):
        bsmm.l2_normalize(w, np.ones(3))


def test_columns_of_blocks_begin_orthonormal(bsmm):
    full = dense(bsmm, bsmm.ortho_init(seed=0)(bsmm.w_shape, np.float64))
    for k in range(bsmm.KB):
        column = full[:, 16 * k : 16 * k + 16]
        np.testing.assert_allclose(column.T @ column, np.eye(16) * column.any(), atol=1e-12)
    wide = BlocksparseMatMul(np.ones((2, 3)), 8)
    rows = np.zeros((16, 24))
    for i, block in enumerate(wide.ortho_init(seed=0)(dtype=np.float64)):
        c, k = wide.block_coord(i)
        rows[8 * c : 8 * c + 8, 8 * k : 8 * k + 8] = block
    np.testing.assert_allclose(rows @ rows.T, np.eye(16), atol=1e-12)


def test_projections_of_torch():
    projection = SparseProj(10, gather_lut=[1, 4, 7])
    x = torch.arange(20.0).view(10, 2).requires_grad_()
    y = torch.full((3, 2), 2.0, requires_grad=True)
    lut = projection.gather_lut
    torch.testing.assert_close(projection.gather(x), x[lut])
    spread = projection.scatter(y)
    assert spread.sum() == y.sum()
    torch.testing.assert_close(projection.scatter_add(x, y), x + spread)
    scaled = projection.scatter_mul(x, y)
    torch.testing.assert_close(scaled, x + spread / 2 * x)
    scaled.sum().backward()
    torch.testing.assert_close(y.grad, x.detach()[lut])
    with pytest.raises(NotImplementedError, match=r"torch\.linear_wgrad"):
        group_param_grads(x)
