"""Sums depend on how many threads make them, so a file is read by as many as have written it."""

import pytest
import torch
from tiny_language_models import TINY

from blocksparse.models.language import LanguageModel
from blocksparse.models.language.compression import CompressionError, Header, compress, decompress
from blocksparse.models.language.stepping import Stepper

pytest.importorskip("constriction")


def test_the_model_runs_with_the_threads_of_the_encoder(monkeypatch):
    torch.manual_seed(0)
    model, seen = LanguageModel(TINY), []

    def watch(name):
        watched = getattr(Stepper, name)

        def and_note(self, *given):
            seen.append(torch.get_num_threads())
            return watched(self, *given)

        monkeypatch.setattr(Stepper, name, and_note)

    watch("__init__")
    watch("__call__")
    before = torch.get_num_threads()
    try:
        for threads, others in ((2, 1), (1, 2), (3, 1)):
            torch.set_num_threads(threads)
            made = compress(model, b"some text", streams=2)
            assert set(seen) == {threads}
            assert Header.unpack(made)[0].threads == threads
            seen.clear()
            torch.set_num_threads(others)
            assert decompress(model, made) == b"some text"
            assert set(seen) == {threads}
            assert torch.get_num_threads() == others
            header, payload = Header.unpack(made)
            with pytest.raises(CompressionError):
                decompress(model, Header(**{**header.__dict__, "text": bytes(4)}).pack(payload))
            assert torch.get_num_threads() == others, "after an error, too"
            seen.clear()
    finally:
        torch.set_num_threads(before)
