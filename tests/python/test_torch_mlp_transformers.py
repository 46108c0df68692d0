"""The MLPs of real models of transformers: found by their structure, replaced, and computing what they did."""

import pytest
import torch
from torch import nn

import blocksparse.torch as bst

transformers = pytest.importorskip("transformers")

IN, HIDDEN, WORDS = 64, 96, 61
SHARED = {
    "vocab_size": WORDS,
    "hidden_size": IN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}
GPT2 = {"vocab_size": WORDS, "n_embd": IN, "n_inner": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 32}
MODELS = {  # options, activation, gated, names of the first MLP
    "Llama": (SHARED | {"mlp_bias": True}, "silu", True, "layers.0.mlp"),
    "Mistral": (SHARED, "silu", True, "layers.0.mlp"),
    "Qwen2": (SHARED, "silu", True, "layers.0.mlp"),
    "Qwen3": (SHARED | {"head_dim": 16}, "silu", True, "layers.0.mlp"),
    "Gemma": (SHARED | {"head_dim": 16}, "gelu_tanh", True, "layers.0.mlp"),
    "Phi3": (SHARED | {"pad_token_id": 0}, "silu", True, "layers.0.mlp"),
    "GPT2": (GPT2, "gelu_tanh", False, "h.0.mlp"),
    "Bert": (SHARED, "gelu", False, "encoder.layer.0"),
    "Roberta": (SHARED, "gelu", False, "encoder.layer.0"),
}


def make(name):
    options = MODELS[name][0]
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}Model")(config).eval()


def run(model):
    words = torch.arange(2 * 9).view(2, 9) * 7 % WORDS
    with torch.no_grad():
        return model(words).last_hidden_state


@pytest.mark.parametrize("name", MODELS)
def test_mlps_are_found_and_replaced(name):
    _, activation, gated, first = MODELS[name]
    model = make(name)
    with torch.no_grad():  # biases are 0 in new models
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    found = bst.find_mlps(model)
    assert len(found) == 2
    parts = found[first]
    assert (parts.activation, parts.gated) == (activation, gated)
    assert parts.weights()["up"].shape == (HIDDEN, IN)
    assert parts.weights()["down"].shape == (IN, HIDDEN)
    before = run(model)
    replaced = bst.replace_mlps(model, density=1.0, block_size=16)
    assert set(replaced) == set(found)
    torch.testing.assert_close(run(model), before, rtol=1e-4, atol=1e-5)
    assert sum(isinstance(m, bst.BlockSparseMLP) for m in model.modules()) == 2
    assert bst.find_mlps(model) == {}
    left = [m for m in model.modules() if isinstance(m, nn.Linear) and HIDDEN in (m.in_features, m.out_features)]
    assert left == []


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
def test_a_pruned_model_keeps_what_it_computes(name):
    model = make(name)
    for parts in bst.find_mlps(model).values():
        with torch.no_grad():
            for weight in (w for key, w in parts.weights().items() if not key.endswith("bias")):
                grid = torch.rand(weight.size(0) // 16, weight.size(1) // 16) < 0.3
                weight.mul_(grid.repeat_interleave(16, 0).repeat_interleave(16, 1))
    before = run(model)
    for mlp in bst.replace_mlps(model, pruned=True, block_size=16).values():
        assert mlp.down.layout.density < 0.6
    torch.testing.assert_close(run(model), before, rtol=1e-4, atol=1e-5)
    twin = make(name)
    layouts = [(m.up.layout, m.down.layout) for m in model.modules() if isinstance(m, bst.BlockSparseMLP)]
    for (key, parts), both in zip(bst.find_mlps(twin).items(), layouts, strict=True):
        mlp = bst.BlockSparseMLP.from_dense(parts, layouts=both)
        bst.put_mlp(twin, key, parts, mlp)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(run(twin), run(model))


def test_a_model_learns_with_its_own_loss():
    config = transformers.LlamaConfig(**SHARED)
    model = transformers.LlamaForCausalLM(config)
    bst.replace_mlps(model, density=0.5, block_size=16)
    words = torch.randint(WORDS, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = model(words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("name", "options", "hidden", "out"),
    [
        ("T5", {"d_model": IN, "d_ff": HIDDEN, "dropout_rate": 0.5, "feed_forward_proj": "relu"}, 0.5, 0),
        ("T5", {"d_model": IN, "d_ff": HIDDEN, "dropout_rate": 0.5, "feed_forward_proj": "gated-gelu"}, 0.5, 0),
        ("GPT2", GPT2 | {"resid_pdrop": 0.3}, 0, 0.3),
        ("Llama", SHARED, 0, 0),
    ],
)
def test_features_are_dropped_where_the_model_drops_them(name, options, hidden, out):
    more = {"vocab_size": WORDS, "num_layers": 1, "num_heads": 4, "d_kv": 16} if name == "T5" else {}
    config = getattr(transformers, f"{name}Config")(**options, **more)
    model = getattr(transformers, f"{name}EncoderModel" if name == "T5" else f"{name}Model")(config)
    parts = next(iter(bst.find_mlps(model).values()))
    assert (parts.hidden_dropout, parts.dropout) == (hidden, out)
