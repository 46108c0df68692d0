"""The guide to JAX runs."""

import guides
import pytest

pytest.importorskip("jax")


def test_code_runs(tmp_path, monkeypatch):
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    monkeypatch.chdir(tmp_path)
    assert guides.run(guides.DOCS / "guide" / "jax.md") > 3
