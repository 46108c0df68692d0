"""Times of short calls on a card, without the host's part: by a card that is played."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from blocksparse.torch.sparsify.conversion import timing


class Card:
    """A card whose queue holds so many kernels, and the clock of its host, who waits for a place in it."""

    HZ = 1.98e9

    def __init__(self, monkeypatch, places=1000):
        self.now, self.ends, self.places = 0.0, [], places
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.put(cycles / self.HZ), raising=False)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: CardEvent(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait(self.end))

    @property
    def end(self):
        return self.ends[-1] if self.ends else 0.0

    def put(self, seconds):
        """A kernel; returns when it ends."""
        if len(self.ends) >= self.places:
            self.wait(self.ends[-self.places])
        self.ends.append(max(self.now, self.end) + seconds)

    def wait(self, until):
        self.now = max(self.now, until)


class CardEvent:
    def __init__(self, card):
        self.card = card

    def record(self):
        self.card.put(0)
        self.at = self.card.end

    def query(self):
        return self.card.now >= self.at

    def synchronize(self):
        self.card.wait(self.at)

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class Launching(nn.Module):
    """Of some kernels, each of which takes host and card their time; the first call may take the host longer."""

    def __init__(self, card, kernels, host, on_card, late=0.0, waits=False):
        super().__init__()
        self.card, self.kernels, self.host, self.on_card = card, kernels, host, on_card
        self.late, self.waits = late, waits

    def forward(self, x):
        self.card.now, self.late = self.card.now + self.late, 0.0
        for _ in range(self.kernels):
            self.card.now += self.host
            self.card.put(self.on_card)
        if self.waits:
            self.card.wait(self.card.end)


@pytest.mark.parametrize(
    ("one", "other", "calls"),
    [
        ({"kernels": 1, "host": 20e-6, "on_card": 3e-6}, {"kernels": 1, "host": 30e-6, "on_card": 2e-6}, 20),
        ({"kernels": 1, "host": 20e-6, "on_card": 3e-6}, {"kernels": 1, "host": 20e-6, "on_card": 2e-6, "late": 1}, 20),
        ({"kernels": 100, "host": 5e-6, "on_card": 3e-6}, {"kernels": 1, "host": 9e-6, "on_card": 9e-6}, 5),
        ({"kernels": 900, "host": 5e-6, "on_card": 3e-6}, {"kernels": 1, "host": 9e-6, "on_card": 9e-6}, 1),
        ({"kernels": 2, "host": 9e-6, "on_card": 5e-6, "waits": 1}, {"kernels": 1, "host": 9e-6, "on_card": 3e-6}, 0),
        ({"kernels": 2000, "host": 5e-6, "on_card": 3e-6}, {"kernels": 1, "host": 9e-6, "on_card": 9e-6}, 0),
    ],
)
def test_a_card_sleeps_while_calls_are_queued(monkeypatch, one, other, calls):
    card, x = Card(monkeypatch), torch.zeros(1)
    layers = [Launching(card, **one), Launching(card, **other)]
    assert timing._asleep_for(layers, x) == calls
    for layer in layers if calls else ():
        queued = timing.Queued(layer, x)
        began = card.now
        assert queued.timeit(calls) / calls == pytest.approx(layer.kernels * layer.on_card)
        assert card.now - began < 2 * timing.MOST_SLEEP
