"""Every public name of version 0.1 is where it was; from modules that have moved it comes with a warning."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = {
    "blocksparse": "Layout UnavailableError UnsupportedError __version__ cpu_isa cpu_isas cuda_status graphs "
    "set_cpu_isa",
    "blocksparse.__main__": "main",
    "blocksparse.conv": "BlocksparseConv BlocksparseDeconv",
    "blocksparse.cupy": "Array conv_dgrad conv_fprop conv_geometry conv_output_size conv_wgrad linear_dgrad "
    "linear_fprop linear_wgrad",
    "blocksparse.graphs": "Degrees Report balanced_random banded barabasi_albert block_diagonal butterfly dense mix "
    "percent random report watts_strogatz watts_strogatz_torus",
    "blocksparse.layout": "Layout need_layout",
    "blocksparse.matmul": "BlocksparseMatMul",
    "blocksparse.models": "",
    "blocksparse.models.bars": "Done bytes_bar",
    "blocksparse.models.captured": "CapturedStep Forward WARM_UPS",
    "blocksparse.models.checkpoint": "FORMAT load save",
    "blocksparse.models.command": "SUFFIX VALID_BYTES add_parser run",
    "blocksparse.models.compression": "CHECK_BYTES CompressionError Header LIKELIEST MAGIC MODEL_BYTES MOST_STREAMS "
    "MOST_THREADS Progress compress decompress digest_of environment",
    "blocksparse.models.distributed": "ALONE World device_of joined",
    "blocksparse.models.features": "Array FORMAT cell_states load_features save_features unit_at_each_byte",
    "blocksparse.models.files": "check_writable write_whole",
    "blocksparse.models.images": "Images ImagesError read_all read_images shrink write_png",
    "blocksparse.models.l1_logistic": "ITERATIONS LOOKS POWERS TOLERANCE fit largest_square",
    "blocksparse.models.language": "LanguageModel ModelConfig PRESETS SYMBOLS bits_per_byte check_seed chunks loss_of "
    "sample",
    "blocksparse.models.pixelcnn.config": "ModelConfig PRESETS TrainConfig",
    "blocksparse.models.pixelcnn.likelihood": "bits_per_dim draw log_likelihood to_bytes to_range",
    "blocksparse.models.pixelcnn.network": "PixelCNN",
    "blocksparse.models.pixelcnn.sampling": "sample",
    "blocksparse.models.pixelcnn.training": "Trainer bits_per_dim load_model loss_of",
    "blocksparse.models.sentiment": "Array STRENGTHS Score Split UNITS_AT_ONCE Unit bag_of_ngrams best_unit classify "
    "classify_at_once colour_text cross_validation fixed_split mcnemar plot_unit unit_score",
    "blocksparse.models.texts": "ALTERED ESCAPE Examples detokenise prepare read_imdb read_labelled",
    "blocksparse.models.training": "LINE SUMS TrainConfig Trainer load_model load_weights read_text train",
    "blocksparse.numpy": "Array conv_dgrad conv_fprop conv_geometry conv_output_size conv_wgrad linear_dgrad "
    "linear_fprop linear_wgrad",
    "blocksparse.torch": "BlockSparseConv1d BlockSparseConv2d BlockSparseConv3d BlockSparseConvTranspose1d "
    "BlockSparseConvTranspose2d BlockSparseConvTranspose3d BlockSparseGLU BlockSparseLSTM BlockSparseLinear "
    "BlockSparseMLP DeepUpdateLSTM EdgeBias MLPParts MultiplicativeLSTM conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d dense_mlp find_mlps from_bsr from_dense glu index_of interleave "
    "interleave_rows interleaved_layout linear linear_glu linear_wgrad lstm mlp_parts put_mlp "
    "replace_convolutions replace_mlps select_blocks separate separate_rows to_bsr to_dense weight_norm",
    "blocksparse.torch.conv": "Padding Sizes as_order check_geometry conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d make_geometry per_size",
    "blocksparse.torch.conv_modules": "BlockSparseConv BlockSparseConv1d BlockSparseConv2d BlockSparseConv3d "
    "BlockSparseConvTranspose1d BlockSparseConvTranspose2d BlockSparseConvTranspose3d",
    "blocksparse.torch.convert": "from_bsr from_dense grid_of select_blocks to_bsr to_dense",
    "blocksparse.torch.deep_update": "DeepUpdateLSTM EPSILON WORTH_BLOCKS",
    "blocksparse.torch.deep_update_op": "DeepUpdate NORMS WEIGHTS norms",
    "blocksparse.torch.deep_update_steps": "Cell Matrix Network Norm prepare run",
    "blocksparse.torch.device_layout": "DeviceLayout from_device_mask",
    "blocksparse.torch.edge_bias": "EdgeBias",
    "blocksparse.torch.functional": "apply_linear linear linear_wgrad usable",
    "blocksparse.torch.index": "index_of load_kernels",
    "blocksparse.torch.layer": "BlockSparseLayer Self",
    "blocksparse.torch.lstm": "BlockSparseLSTM GATES MultiplicativeLSTM Recurrent UNITS cell per_layer projection "
    "run_steps stack_gates start_of",
    "blocksparse.torch.modules": "BlockSparseLinear",
    "blocksparse.torch.multiplicative_op": "Multiplicative",
    "blocksparse.torch.norm": "backward forward layer_norm",
    "blocksparse.torch.recurrent": "SharedWeight State apply_cell apply_lstm lstm",
    "blocksparse.torch.sequence_op": "Blocks FullBlocks Given Network run takes",
    "blocksparse.torch.surgery": "replace_convolutions",
    "blocksparse.torch.weight_norm": "weight_norm",
    "blocksparse.viz": "plot_layout",
}


MOVED = {  # for one release
    "blocksparse.models.captured": ["blocksparse.models.language.captured"],
    "blocksparse.models.command": ["blocksparse.models.language.command"],
    "blocksparse.models.compression": ["blocksparse.models.language.compression"],
    "blocksparse.models.features": ["blocksparse.models.sentiment.features"],
    "blocksparse.models.l1_logistic": ["blocksparse.models.sentiment.l1_logistic"],
    "blocksparse.models.texts": ["blocksparse.models.sentiment.texts"],
    "blocksparse.models.training": ["blocksparse.models.language.training", "blocksparse.models.checkpoint"],
    "blocksparse.torch.conv_modules": ["blocksparse.torch.modules.conv"],
    "blocksparse.torch.deep_update_op": ["blocksparse.torch.autograd.deep_update"],
    "blocksparse.torch.deep_update_steps": ["blocksparse.torch.autograd.deep_update_steps"],
    "blocksparse.torch.index": ["blocksparse.torch.tables"],
    "blocksparse.torch.layer": ["blocksparse.torch.modules.layer"],
    "blocksparse.torch.multiplicative_op": ["blocksparse.torch.autograd.multiplicative"],
    "blocksparse.torch.sequence_op": ["blocksparse.torch.autograd.sequence", "blocksparse.torch.blocks"],
}


@pytest.mark.filterwarnings("ignore:.* has moved to:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name):
    module = importlib.import_module(name)
    missing = [public for public in NAMES[name].split() if not hasattr(module, public)]
    assert missing == []
    assert not hasattr(module, "no_such_name")


SAYS_SO = """
import importlib, json, sys, warnings
import blocksparse.torch
for old, new in json.loads(sys.argv[1]).items():
    names = json.loads(sys.argv[2])[old].split()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
        assert not caught
        for name in names:
            place = next(place for place in map(importlib.import_module, new) if hasattr(place, name))
            assert getattr(module, name) is getattr(place, name)
        exec(f"from {old} import {names[0]}")
    (warning,) = caught
    assert warning.category is DeprecationWarning and warning.filename == "<string>"
    print(warning.message)
"""


def test_moved_modules_say_so_once():
    command = [sys.executable, "-c", SAYS_SO, json.dumps(MOVED), json.dumps(NAMES)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        f"{old} has moved to {' and '.join(new)}; the old name works for one release" for old, new in MOVED.items()
    ]


def test_modules_and_functions_of_one_name():
    """`lstm` is a module, too, whose import must not hide the function, and others are there without an import."""
    code = """
import blocksparse.torch as bst
for name in ("conv", "conv_modules", "deep_update", "index", "norm", "recurrent", "sequence_op", "layer", "modules"):
    assert getattr(bst, name).__name__ == f"blocksparse.torch.{name}"
from blocksparse.torch.lstm import cell
from blocksparse.torch.weight_norm import weight_norm
from blocksparse.torch.functional.linear import apply_linear
assert callable(bst.lstm) and bst.weight_norm is weight_norm and callable(bst.functional.linear)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


PAGE = Path(__file__).parents[2] / "docs" / "api" / "python.rst"
LISTED = re.findall(r"automodule:: (\S+)\n +:members: (.+)", PAGE.read_text())


@pytest.mark.parametrize(("module", "names"), LISTED)
def test_names_that_the_site_lists_are_there(module, names):
    found = pytest.importorskip(module)
    assert [name for name in names.split(", ") if not hasattr(found, name)] == []


def test_the_site_lists_names():
    assert len(LISTED) > 4
