"""Drawing by what is new alone gives what whole passes give, of the same random numbers."""

import pytest

torch = pytest.importorskip("torch")

from test_pixelcnn_network import CONFIGS, ready  # noqa: E402

from blocksparse.models.pixelcnn.sampling import sample  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "size"),
    [("dense", (5, 6)), ("diagonal", (4, 4)), ("nin", (1, 3)), ("balanced", (3, 7)), ("ba", (6, 5)), ("ws", (4, 1))],
)
def test_the_same_images(name, size):
    """In float64, where sums in another order do not move a pixel to another byte."""
    model = ready(CONFIGS[name]).double()
    done = []
    ours = sample(model, 3, size, seed=1, progress=done.append)
    assert torch.equal(ours, sample(model, 3, size, seed=1, plain=True))
    assert done == list(range(1, size[0] * size[1] + 1))
    assert ours.dtype == torch.uint8
    assert ours.shape == (3, model.config.channels, *size)
    assert not torch.equal(ours, sample(model, 3, size, seed=2))


def test_lower_halves():
    config = CONFIGS["dense"]
    model = ready(config).double()
    given = torch.randint(0, 256, (2, 3, 4, 3), dtype=torch.uint8)
    for rows in (1, 3):
        ours = sample(model, 2, (4, 3), given=given, rows=rows)
        assert torch.equal(ours, sample(model, 2, (4, 3), given=given, rows=rows, plain=True))
        assert torch.equal(ours[:, :, :rows], given[:, :, :rows])
    other = given.clone()
    other[:, :, 3:] = 7  # what is drawn does not depend on what was there
    assert torch.equal(sample(model, 2, (4, 3), given=other, rows=3), sample(model, 2, (4, 3), given=given, rows=3))


def test_a_batch_is_its_images():
    """Each image has random numbers of its own; a model that is trained is left in training."""
    model = ready(CONFIGS["ws"]).double().train()
    ours = sample(model, 2, (4, 4), seed=3)
    assert model.training
    assert not torch.equal(ours[0], ours[1])

    def interrupt(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(model, 2, (4, 4), progress=interrupt)
    assert model.training


def test_what_cannot_be_drawn():
    model = ready(CONFIGS["nin"])
    with pytest.raises(ValueError, match="0 images of 4 x 4"):
        sample(model, 0, (4, 4))
    with pytest.raises(ValueError, match=r"images are \[1, 1, 4, 5\], needs \[1, 1, 4, 4\]"):
        sample(model, 1, (4, 4), given=torch.zeros(1, 1, 4, 5))
    with torch.no_grad():
        model.stack_of("head").bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="gives no probabilities, but NaN"):
        sample(model, 1, (2, 2))
