"""The loss of a student beside its teacher, against its formula."""

import copy

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    def __init__(self, wrap=lambda logits: logits):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.drop, self.head, self.wrap = nn.Dropout(0.5), nn.Linear(16, 5), wrap

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return self.wrap(self.head(x))


def two(**options):
    return Net(**options), Net(**options).eval()


def formula(teacher, student, x, temperature, mask=None):
    """KL and relative MSE of layers, in plain operations."""
    outputs = []
    for net in (teacher.eval(), student):
        a = net.layers[0](x)
        b = net.layers[1](torch.tanh(a))
        outputs.append((a, b, net.head(torch.tanh(b))))
    if mask is not None:
        outputs = [[values[mask.bool()] for values in row] for row in outputs]
    (a, b, z), (a_, b_, z_) = outputs
    p, q = (z / temperature).softmax(-1), (z_ / temperature).softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1).mean() * temperature**2
    return kl, [((t - s) ** 2).mean() / (t**2).mean() for t, s in ((a, a_), (b, b_))]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_its_formula(temperature, masked):
    teacher, student = two()
    x = torch.randn(3, 4, 16)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]) if masked else None
    distiller = bss.Distiller(teacher, student, layers=r"layers\.\d", temperature=temperature)
    found = distiller(x, mask=mask)
    kl, layers = formula(teacher, student, x, temperature, mask)
    torch.testing.assert_close(found.kl, kl)
    torch.testing.assert_close(list(found.layers.values()), layers)
    torch.testing.assert_close(found.loss, kl + sum(layers) / 2)
    assert torch.equal(found.output, student(x))
    found.loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert teacher.layers[0]._forward_hooks == {} == student.layers[0]._forward_hooks


def test_with_a_task_and_nothing_to_learn():
    teacher, _ = two()
    student = copy.deepcopy(teacher).eval()
    x, label = torch.randn(6, 16), torch.randint(5, (6,))

    def task(output):
        return nn.functional.cross_entropy(output, label)

    same = bss.Distiller(teacher, student, layers=["layers.0"], alpha=0.25)(x, task=task)
    torch.testing.assert_close(same.loss, 0.75 * task(student(x)))
    teacher.train()
    bss.Distiller(teacher, student)(x)
    assert teacher.training  # it has run in eval mode, and is as it was


def test_layers_that_are_replaced_meanwhile_count():
    teacher, _ = two()
    student = copy.deepcopy(teacher)
    distiller = bss.Distiller(teacher, student, layers={"layers.0": "layers.0"}, temperature=None)
    x = torch.randn(8, 16)
    assert float(distiller(x).loss.detach()) == 0
    bst.replace_linears(student, density=0.5, block_size=8, targets="layers")
    found = distiller(x)
    assert float(found.loss.detach()) > 0
    assert found.kl is None
    found.loss.backward()
    assert student.layers[0].weight.grad is not None


def test_distilling_brings_a_sparse_student_closer():
    torch.manual_seed(1)
    teacher, _ = two()
    student, x = copy.deepcopy(teacher.eval()), torch.randn(256, 16)
    masks = bss.sparsify_(student, "magnitude", sparsity=0.5, block_size=8, targets="layers")
    student = bss.convert(student.eval(), masks, block_size=8, min_speedup=0)
    distiller = bss.Distiller(teacher, student, layers=r"layers\.1")
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = distiller(x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0]


class Answer(dict):
    """As models of transformers answer."""

    def __getattr__(self, name):
        return self[name]


@pytest.mark.parametrize("wrap", [lambda z: Answer(logits=z), lambda z: type("Answer", (), {"logits": z})()])
def test_where_logits_are(wrap):
    teacher, student = two(wrap=wrap)
    plain = Net()
    plain.load_state_dict(student.state_dict())
    x = torch.randn(4, 16)
    found = bss.Distiller(teacher, student)(x).kl
    torch.testing.assert_close(found, formula(teacher, student, x, 2.0)[0])
    pairs = bss.Distiller(*two(wrap=lambda z: (z,)), logits=lambda output: output[0])
    assert float(pairs(x).kl.detach()) > 0
    with pytest.raises(ValueError, match="a tuple, has no logits: give logits=, or temperature=None"):
        bss.Distiller(*two(wrap=lambda z: (z,)))(x)


def test_wrong_calls():
    teacher, student = two()
    x = torch.randn(4, 16)
    with pytest.raises(TypeError, match="are one module"):
        bss.Distiller(teacher, teacher)
    with pytest.raises(TypeError, match="student is 3"):
        bss.Distiller(teacher, 3)
    narrow = Net()
    narrow.layers[1], narrow.head = nn.Linear(16, 8), nn.Linear(8, 5)
    for call, text in (
        (
            lambda: bss.Distiller(teacher, student, layers="nothing"),
            "'nothing', which matches none of layers, layers.0",
        ),
        (lambda: bss.Distiller(teacher, student, layers=["layers.7"]), "the teacher has no 'layers.7'"),
        (lambda: bss.Distiller(teacher, student, layers={"head": "tail"}), "the student has no 'tail'"),
        (lambda: bss.Distiller(teacher, student, temperature=None), "it would compare nothing"),
        (lambda: bss.Distiller(teacher, student, temperature=0.0), "temperature is 0.0"),
        (lambda: bss.Distiller(teacher, student, alpha=1.5), "alpha is 1.5"),
        (lambda: bss.Distiller(teacher, student, layers="("), "layers is '.', needs a regular expression"),
        (lambda: bss.Distiller(teacher, student)(x, mask=torch.zeros(4)), r"mask \[4\] leaves nothing to compare"),
        (
            lambda: bss.Distiller(teacher, narrow, layers=["layers.1"])(x),
            r"layers.1 gives \[4, 8\], its teacher \[4, 16",
        ),
        (
            lambda: bss.Distiller(teacher, student)(x, mask=torch.ones(3)),
            r"mask is \[3\], needs the first dimensions of one of \[4, 5\]",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    gone = bss.Distiller(teacher, student, layers=["layers.1"])
    del student.layers[1]
    with pytest.raises(ValueError, match=r"the model has no layers.1 now: .* There is layers, layers.0"):
        gone(x)


def test_layers_of_a_transformer_are_watched_with_padded_inputs_as_they_are():
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2)}).eval()
    x, padded = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def forward(model, batch):
        return model["encoder"](batch[0], src_key_padding_mask=batch[1])

    options = {"block_size": 16, "forward": forward}
    masks = bss.sparsify_(
        model, "wanda", sparsity=0.5, calibration=[(x, padded)], targets=r"linear", progress=False, **options
    )
    distiller = bss.Distiller(
        copy.deepcopy(model), model.train(), layers=r"encoder\.layers\.\d", temperature=None, forward=forward
    )
    assert distiller((x, padded), mask=~padded).loss == 0
    assert torch.backends.mha.get_fastpath_enabled()
    expected, timings = forward(model, (x, padded)), {}
    bss.convert(model, masks, min_speedup=1e-9, example=(x, padded), timings=timings, **options)
    assert timings["encoder.layers.1.linear2"].shape == (2, 5, 64)
    torch.testing.assert_close(forward(model, (x, padded)), expected, rtol=1e-4, atol=1e-4)
