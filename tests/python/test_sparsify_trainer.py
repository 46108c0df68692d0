"""The callbacks for transformers' Trainer and Lightning, with the real libraries; skipped where one is missing."""

import functools
import importlib.util
import json
import shutil

import pytest
import torch
from torch import nn

import blocksparse.torch.sparsify as bss

pytestmark = pytest.mark.usefixtures("one_thread")
needs_transformers = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")), reason="no transformers"
)
needs_lightning = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="no lightning")
SCHEDULE = bss.PolynomialDecay(0.75, begin_step=1, end_step=8, frequency=2)
KINDS = {"magnitude": bss.MagnitudePruner, "blast": bss.Blast, "l0": bss.L0, "lasso": bss.GroupLasso}
KINDS["moving"] = functools.partial(bss.MagnitudePruner, compact_at=(0.6, 0.3))


def assert_same(one, another):
    assert one.keys() == another.keys()
    assert all(torch.equal(one[key], another[key]) for key in one)


def check_end(pruner, steps):
    assert pruner.steps == steps
    for name, mask in pruner.masks().items():
        assert int(mask.sum()) == mask.numel() // 4, name
        assert torch.equal(pruner.layers[name].target.norms() > 0, mask)


# ---- transformers ----------------------------------------------------------------------------------------------------


def language_model(seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.1)
    return GPT2LMHeadModel(config)


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, i):
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def trainer_of(folder, kind, steps=10, **options):
    from transformers import Trainer, TrainingArguments

    from blocksparse.torch.sparsify.trainer import SparsifyCallback

    model = language_model()
    pruner = KINDS[kind](SCHEDULE, block_size=8, targets=r"mlp\.|c_attn")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
    )
    optimizers = (None, None)
    if kind == "l0":  # whose gates are in an optimizer that the user makes
        pruner.prepare(model)
        groups = [{"params": list(model.parameters())}, {"params": pruner.parameters(), "lr": 0.02}]
        optimizers = (torch.optim.AdamW(groups, lr=1e-2), None)
    callback = SparsifyCallback(pruner, **options)
    return Trainer(model, arguments, train_dataset=Texts(), callbacks=[callback], optimizers=optimizers), pruner


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_prunes_and_resumes_bit_for_bit(kind, tmp_path):
    trainer, pruner = trainer_of(tmp_path / "a", kind)
    trainer.train()
    check_end(pruner, 10)
    assert {t.name for t in pruner.targets} == {
        f"transformer.h.{i}.{part}" for i in (0, 1) for part in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")
    }
    assert pruner.layers["transformer.h.0.mlp.c_fc"].target.sizes == (128, 32), "Conv1D is [in, out]"
    checkpoint = tmp_path / "a" / "checkpoint-4" if kind == "moving" else None
    again, same = trainer_of(tmp_path / "a", kind, checkpoint=checkpoint)
    shutil.rmtree(tmp_path / "a" / "checkpoint-8")
    shutil.rmtree(tmp_path / "a" / "checkpoint-10")
    again.train(resume_from_checkpoint=True)
    check_end(same, 10)
    assert_same(trainer.model.state_dict(), again.model.state_dict())


@needs_transformers
def test_a_trainer_without_the_sparsifiers_file(tmp_path):
    trainer, _ = trainer_of(tmp_path / "a", "magnitude", steps=4)
    trainer.train()
    moved = tmp_path / "elsewhere"
    (tmp_path / "a" / "checkpoint-4").rename(moved)
    trainer, _ = trainer_of(tmp_path / "a", "magnitude")
    with pytest.raises(FileNotFoundError, match=r"there is no .*checkpoint-4.* saving was cut off.*give it as"):
        trainer.train(resume_from_checkpoint=str(moved))
    trainer, pruner = trainer_of(tmp_path / "a", "magnitude", checkpoint=moved)
    trainer.train(resume_from_checkpoint=str(moved))
    check_end(pruner, 10)
    file = moved / "sparsifier.pt"
    file.write_bytes(file.read_bytes()[:1000])
    trainer, _ = trainer_of(tmp_path / "a", "magnitude", checkpoint=moved)
    with pytest.raises(ValueError, match=r"sparsifier.pt cannot be read, or is damaged"):
        trainer.train(resume_from_checkpoint=str(moved))


@needs_transformers
def test_what_a_trainer_saves_is_an_ordinary_model(tmp_path):
    from transformers import GPT2LMHeadModel

    trainer, pruner = trainer_of(tmp_path / "a", "magnitude")
    trainer.train()
    masks = pruner.masks()
    pruner.squash_mask()
    trainer.save_model(tmp_path / "saved")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert "weight_gates" not in json.dumps(list(model.state_dict()))
    targets = bss.find_targets(model, 8, targets=r"mlp\.|c_attn")
    assert_same(bss.masks_of_zeros(targets), masks)


# ---- Lightning -------------------------------------------------------------------------------------------------------


def fit(folder, kind, ckpt=None, precision="32-true"):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from blocksparse.torch.sparsify.lightning import SparsifyCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            self.head = nn.Linear(32, 4)

        def training_step(self, batch, _):
            (x,) = batch
            return nn.functional.mse_loss(self.head(self.net(x)), x[:, :4].sin())

        def configure_optimizers(self):
            gates = [{"params": pruner.parameters(), "lr": 0.02}] if kind == "l0" else []
            return torch.optim.AdamW([{"params": list(self.parameters())}, *gates], lr=1e-2)

    pruner = KINDS[kind](SCHEDULE, block_size=8, targets="^net")
    data = torch.utils.data.TensorDataset(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))
    checkpoints = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=10,
        accumulate_grad_batches=2,
        callbacks=[SparsifyCallback(pruner), checkpoints],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        precision=precision,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=ckpt)
    return module, pruner


@needs_lightning
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_lightning_prunes_and_resumes_bit_for_bit(kind, tmp_path):
    module, pruner = fit(tmp_path, kind)
    check_end(pruner, 10)
    again, same = fit(tmp_path, kind, ckpt=tmp_path / "step=4.ckpt")
    check_end(same, 10)
    assert_same(module.state_dict(), again.state_dict())
    assert "on_load_checkpoint" not in vars(again), "which could not be pickled"


@needs_lightning
@pytest.mark.filterwarnings("ignore")
def test_lightning_in_bfloat16(tmp_path):
    _, pruner = fit(tmp_path, "magnitude", precision="bf16-mixed")
    check_end(pruner, 10)
