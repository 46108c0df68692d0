"""Shared by all Python tests."""

from __future__ import annotations

import numpy as np
import pytest

import blocksparse
from blocksparse import Layout


@pytest.fixture(params=blocksparse.cpu_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Runs the test once with each instruction set that this CPU has."""
    blocksparse.set_cpu_isa(request.param)
    yield request.param
    blocksparse.set_cpu_isa("")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def layout() -> Layout:
    """A ragged one with empty places: 60 x 90 in blocks of 16."""
    return Layout.from_graph("random(4,6,0.4)", 16, seed=3, out_features=60, in_features=90)
