"""Language models on a card: training as on the CPU, files that return, features."""

import pytest
import torch
from tiny_language_models import SHORT, TINY, same, sentences, weights

import blocksparse
from blocksparse.models.language import LanguageModel, ModelConfig, bits_per_byte
from blocksparse.models.language.compression import compress, decompress
from blocksparse.models.language.training import TrainConfig, Trainer, load_model, read_text, train
from blocksparse.models.sentiment.features import cell_states

WHY_NOT = blocksparse.cuda_status() if torch.cuda.is_available() else "PyTorch sees no CUDA device"
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)

DENSE = ModelConfig(64, "", inner=2, embedding=16, stride=1)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(sentences(600))
    return read_text([path])


@pytest.mark.parametrize("config", [TINY, DENSE], ids=["sparse", "dense"])
def test_training_is_that_of_the_cpu(config, text):
    trainers = [Trainer(config, SHORT, text, device) for device in ("cpu", "cuda")]
    bits = [[trainer.step() for _ in range(4)] for trainer in trainers]
    assert bits[0] == pytest.approx(bits[1], rel=2e-3)
    found = [trainer.evaluate(text[:4000]) for trainer in trainers]
    assert found[0] == pytest.approx(found[1], rel=2e-3)


def test_resumed_is_as_if_never_stopped(text, tmp_path):
    config = TrainConfig(**{**SHORT.__dict__, "bf16": True})
    whole = Trainer(TINY, config, text, "cuda")
    train(whole, tmp_path / "whole", text[:2000], save_every=5)
    train(Trainer(TINY, config, text, "cuda"), tmp_path / "parts", text[:2000], save_every=5, until=7)
    again = Trainer(TINY, config, text, "cuda")
    again.resume(tmp_path / "parts" / "last.safetensors")
    train(again, tmp_path / "parts", text[:2000], save_every=5)
    assert same(weights(whole), weights(again))
    assert load_model(tmp_path / "parts" / "last.safetensors", "cuda").output.is_cuda


@pytest.mark.parametrize("config", [TINY, DENSE], ids=["sparse", "dense"])
@pytest.mark.parametrize("bf16", [False, True])
def test_compressed_files_return(config, bf16):
    pytest.importorskip("constriction")
    model = LanguageModel(config).cuda().eval()
    data = sentences(40)
    for streams in (1, 16):
        part = data[: 100 * streams]
        assert decompress(model, compress(model, part, streams=streams, bf16=bf16)) == part


def test_features_and_bits_are_those_of_the_cpu():
    model = LanguageModel(TINY).eval()
    data = sentences(20)
    texts = [data[:n] for n in (5, 70, 200, 1)]
    on_cpu = cell_states(model, texts)
    bits = bits_per_byte(model, torch.frombuffer(bytearray(data), dtype=torch.uint8))
    model = model.cuda()
    torch.testing.assert_close(torch.tensor(cell_states(model, texts)), torch.tensor(on_cpu), rtol=1e-3, atol=1e-4)
    on_card = bits_per_byte(model, torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda())
    assert on_card == pytest.approx(bits, rel=1e-4)
