"""Feed-forward parts that are shared, and that drop features in training."""

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss


class Shared(nn.Module):
    """A feed-forward part, and perhaps a layer of it somewhere else."""

    def __init__(self, dropped=None, functional=False):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
        self.dropped, self.functional = dropped, functional
        self.drop = nn.Identity() if functional or dropped is None else nn.Dropout(0.25)

    def forward(self, x):
        def drop(y, where):
            if self.dropped != where:
                return y
            return nn.functional.dropout(y, 0.25, self.training) if self.functional else self.drop(y)

        return drop(self.fc2(drop(self.act(self.fc1(drop(x, "in"))), "hidden")), "out")


def test_a_part_at_several_places_stays_one():
    part = Shared()
    model = nn.Sequential(part, nn.Sequential(part), part)
    (made,) = bst.replace_mlps(model, density=0.5, block_size=16).values()
    assert model[0] is model[1][0] is model[2] is made
    model = nn.Sequential(part, nn.Sequential(part))
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    x = torch.randn(4, 64)
    want = model(x)
    model = bss.convert(model, masks, block_size=16, min_speedup=1e-9)
    assert model[0] is model[1][0]
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)


def test_a_part_whose_layer_is_used_elsewhere_is_left_out():
    model = nn.Sequential(Shared(), Shared())
    model[1].add_module("again", model[0].fc1)
    assert list(bst.find_mlps(model)) == ["1"]


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("where", [None, "hidden", "out", "in"])
def test_features_are_dropped_where_they_were(where, functional):
    torch.manual_seed(0)
    dense = Shared(where, functional).train()
    state = torch.get_rng_state()
    parts = bst.mlp_parts(dense)
    assert torch.equal(torch.get_rng_state(), state)
    assert dense.training
    if where == "in":
        assert parts is None
        return
    assert (parts.hidden_dropout, parts.dropout) == {None: (0, 0), "hidden": (0.25, 0), "out": (0, 0.25)}[where]
    sparse = bst.BlockSparseMLP.from_dense(parts, density=1.0, block_size=16)
    y, hidden = [], []
    sparse.down.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    for _ in range(20):
        y.append(sparse(torch.randn(8, 64)))
    for values, place in ((torch.stack(hidden), "hidden"), (torch.stack(y), "out")):
        zeros = float((values == 0).float().mean())
        assert abs(zeros - 0.25) < 0.02 if place == where else zeros == 0


def test_dropouts_are_saved(tmp_path):
    part = bst.BlockSparseMLP.from_dense(Shared("hidden"), density=0.5, block_size=16)
    bst.save_pretrained(nn.Sequential(part), tmp_path / "part.safetensors")
    again = bst.load_pretrained(lambda: nn.Sequential(Shared("hidden")), tmp_path / "part.safetensors")
    assert again[0].hidden_dropout.p == 0.25


def test_dropout_between_layers_in_a_sequence():
    torch.manual_seed(0)
    parts = bst.mlp_parts(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 64), nn.Dropout(0.1))
    )
    assert (parts.hidden_dropout, parts.dropout) == (0.5, 0.1)
    assert bst.mlp_parts(nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))) is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"masks": [1, 2]}, TypeError, "masks is .*, needs a dict of tensors"),
        ({"layouts": 1}, TypeError, "layouts is 1, needs two layouts"),
    ],
)
def test_what_from_dense_takes(given, error, message):
    with pytest.raises(error, match=message):
        bst.BlockSparseMLP.from_dense(Shared(), **given)


def test_weights_that_are_missing():
    with pytest.raises(ValueError, match="weights has no up, down"):
        bst.BlockSparseMLP.from_dense(Shared(), density=0.5).set_weights({})
