"""One-shot pruning, conversion and files of models as transformers builds them, with random weights."""

import pytest
import torch

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.usefixtures("one_thread")


def gpt2():
    config = transformers.GPT2Config(vocab_size=50, n_embd=64, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config).eval()


def llama():
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def bert():
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes), add_pooling_layer=False).eval()


TEXT = {"input_ids": torch.arange(48).view(3, 16)}
KINDS = [gpt2, llama, bert]


def head(build):
    return () if build is bert else "lm_head"


def first(output):
    return output[0]


@pytest.mark.parametrize("build", KINDS)
@pytest.mark.parametrize("least", [0, 1e-9])
def test_pruned_converted_saved_and_loaded(tmp_path, build, least):
    torch.manual_seed(0)
    model = build()
    masks = bss.sparsify_(model, "obs", sparsity=0.5, block_size=16, calibration=[TEXT], ignore=head(build))
    assert len(masks) == {gpt2: 8, llama: 14, bert: 12}[build]
    expected, timings = first(model(**TEXT)), {}
    bss.convert(model, masks, block_size=16, min_speedup=least, example=TEXT, timings=timings)
    torch.testing.assert_close(first(model(**TEXT)), expected, rtol=1e-3, atol=1e-4)
    assert sum(hasattr(module, "layout") for module in model.modules()) >= 8
    assert len(timings) >= (len(masks) if least else 0)
    bst.save_pretrained(model, tmp_path / "x.safetensors")
    loaded = bst.load_pretrained(build, tmp_path / "x.safetensors")
    assert torch.equal(first(loaded(**TEXT)), first(model(**TEXT)))
    if build is not bert:
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


@pytest.mark.parametrize("build", KINDS)
def test_distilled_in_block_sparse_storage(build):
    torch.manual_seed(0)
    teacher, model = build(), build()
    model.load_state_dict(teacher.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = {"layers": r".*\.?(h|layers|layer)\.1", "temperature": None if build is bert else 2.0}
    distiller = bss.Distiller(teacher, model, **options)
    losses = []
    for step in range(24):
        if step in (0, 8):
            masks = bss.sparsify_(
                model, "wanda", sparsity=0.3 + step / 40, block_size=16, calibration=[TEXT], ignore=head(build)
            )
            bss.compact_(model, masks, optimizer, block_size=16)
        loss = distiller(TEXT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[8]
    assert {id(p) for p in model.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
