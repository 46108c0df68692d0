"""Training a PixelCNN++, so that what was stopped goes on as if it had not been."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...torch.modes import evaluating
from .. import checkpoint
from ..distributed import ALONE, World, device_of
from ..files import AnyPath
from ..stopping import Stopped
from ..trainer import Trainer as BaseTrainer
from . import likelihood
from .adam import Adam
from .captured import CapturedLoss
from .config import ModelConfig, TrainConfig
from .network import PixelCNN

KIND = checkpoint.Kind("pixelcnn", "a PixelCNN++", "blocksparse-pixelcnn-1")
INITIAL = 128  # images by which gains and biases are set at first
EVALUATED = 128  # images that are evaluated at once


def seed_of(seed: int, what: str, number: int) -> int:
    """A seed of its own for each use."""
    digest = hashlib.blake2b(f"{seed} {what} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def loss_of(model: PixelCNN, images: Tensor, bf16: bool) -> Tensor:
    """Mean bits per dimension of bytes [n, channels, h, w]."""
    x = likelihood.to_range(images)
    with torch.autocast(images.device.type, torch.bfloat16, bf16):
        outputs = model(x)
    nats = -likelihood.log_likelihood(outputs, x).sum()
    return nats / (images.numel() * math.log(2))


class Trainer(BaseTrainer):
    """A PixelCNN++ on its way. Images are bytes [n, channels, h, w]; each epoch has them in another order."""

    kind, data_name = KIND, "images"
    network: ClassVar[type[PixelCNN]] = PixelCNN
    model: PixelCNN
    model_config: ModelConfig
    config: TrainConfig

    def __init__(
        self,
        model: ModelConfig,
        config: TrainConfig,
        images: Tensor,
        device: torch.device | str,
        world: World = ALONE,
    ) -> None:
        if images.dim() != 4 or images.size(1) != model.channels or len(images) == 0:
            needed = f"[1 or more, {model.channels}, height, width]"
            raise ValueError(f"[pixelcnn] images are {list(images.shape)}, needs {needed}")
        self.mine = world.part(config.batch, "batch")  # of a batch's images
        each = config.batch // world.size
        if each % config.accumulate != 0:
            raise ValueError(
                f"[pixelcnn] each process has {each} images, needs a multiple of {config.accumulate} parts"
            )
        place = device_of(device)
        data_hash = hashlib.sha256(str(list(images.shape)).encode() + images.numpy().tobytes()).hexdigest()
        self.config, self.images = config, images.to(place)
        made = self.network(model).to(place)
        made.initialise(likelihood.to_range(self.images[self._epoch(0)[:INITIAL].to(place)]))
        world.average([p.data for p in made.parameters()])
        super().__init__(model, config, made, Adam(made.parameters(), config.lr), data_hash, place, world)
        self.captured: CapturedLoss | None = None  # on a card, from the first update on
        self.captured_evaluation: CapturedLoss | None = None
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def more_header(self) -> dict[str, Any]:
        """The size of the images, which sampling takes, and where the blocks are."""
        return {"size": list(self.images.shape[2:]), "layouts": self.model.layouts_digest()}

    def seen(self) -> dict[str, int]:
        """Images."""
        return {"images": self.update * self.config.batch}

    def _epoch(self, number: int) -> Tensor:
        """The order of all images in an epoch."""
        generator = torch.Generator().manual_seed(seed_of(self.config.seed, "epoch", number))
        return torch.randperm(len(self.images), generator=generator)

    def _batch(self) -> Tensor:
        """This process's images of the next update, [n, channels, h, w]."""
        n, total = len(self.images), self.config.batch
        places = torch.arange(self.update * total, (self.update + 1) * total)[self.mine]
        chosen = torch.empty_like(places)
        for epoch in (places // n).unique().tolist():
            if self._order[0] != epoch:
                self._order = (epoch, self._epoch(epoch))
            here = places // n == epoch
            chosen[here] = self._order[1][places[here] % n]
        images = self.images[chosen.to(self.device)]
        if self.config.flip:
            generator = torch.Generator().manual_seed(seed_of(self.config.seed, "flip", self.update))
            mirrored = torch.rand(total, generator=generator)[self.mine] < 0.5
            images = torch.where(mirrored.to(self.device).view(-1, 1, 1, 1), images.flip(-1), images)
        return images

    def step(self) -> float:
        """One update; its bits per dimension."""
        c = self.config
        images, rate = self._batch(), self.rate()
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.model.train()
        torch.manual_seed(self._seed())
        loss = self._gradients(images)
        self.world.average([p.grad for p in self.model.parameters() if p.grad is not None])
        self.adam.step()
        self.update += 1
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.values()), list(self.model.parameters()), 1 - c.average(self.update))
        return self.count(float(self.world.sum(loss.clone())) / self.world.size)

    def _seed(self) -> int:
        """Of what dropout leaves out in this update, which depends on nothing before it."""
        return seed_of(self.config.seed, f"dropout of process {self.world.rank}", self.update)

    def _loss(self, images: Tensor) -> Tensor:
        return loss_of(self.model, images, self.config.bf16)

    def _gradients(self, images: Tensor) -> Tensor:
        """Of all parts of a batch, averaged, by a graph on a card; the loss."""
        parts = images.chunk(self.config.accumulate)
        total = torch.zeros((), device=self.device)
        if self.device.type != "cuda":
            self.adam.zero_grad(set_to_none=True)
            for part in parts:
                loss = self._loss(part) / len(parts)
                loss.backward()
                total += loss.detach()
            return total
        if self.captured is None:
            self.captured = CapturedLoss(self._loss, list(self.model.parameters()), parts[0])
            torch.manual_seed(self._seed())
        if len(parts) == 1:
            return self.captured(images)
        gradients, sums = self.captured.gradients, [torch.zeros_like(g) for g in self.captured.gradients]
        for part in parts:
            total += self.captured(part) / len(parts)
            torch._foreach_add_(sums, gradients, alpha=1 / len(parts))
        torch._foreach_copy_(gradients, sums)
        return total

    def evaluate(
        self, images: Tensor, stop: Callable[[], bool] = lambda: False, *, raw: bool = True
    ) -> dict[str, float]:
        """Bits per dimension of other images: `valid` by the averaged weights, `valid_raw` by those of this update.

        Without `raw` the averaged ones alone, in half of the time.

        Raises:
            Stopped: `stop` said so.
        """
        how: dict[str, Any] = {"world": self.world, "stop": stop, "loss": self._evaluated}
        found = {"valid_raw": round(bits_per_dim(self.model, images, **how), 4)} if raw else {}
        with self.averaged():
            return {"valid": round(bits_per_dim(self.model, images, **how), 4), **found}

    def _evaluated(self, images: Tensor) -> Tensor:
        """The loss of so many images, by a graph on a card if they are as many as usual."""
        if self.device.type != "cuda" or len(images) != EVALUATED:
            return self._loss(images)
        if self.captured_evaluation is None:
            self.captured_evaluation = CapturedLoss(self._loss, (), images)
        return self.captured_evaluation(images)


@torch.no_grad()
def bits_per_dim(
    model: PixelCNN,
    images: Tensor,
    batch: int = EVALUATED,
    *,
    bf16: bool = False,
    loss: Callable[[Tensor], Tensor] | None = None,
    world: World = ALONE,
    progress: Callable[[int], None] = lambda done: None,
    stop: Callable[[], bool] = lambda: False,
) -> float:
    """What the model needs for a byte of images [n, channels, h, w], exactly: -log2 P / (channels h w).

    Args:
        model: on any device.
        images: bytes.
        batch: images at once; of no matter for the result.
        bf16: convolutions in bfloat16, by autocast.
        loss: of so many images, in place of `loss_of`.
        world: processes that share the images.
        progress: is told from time to time how many images are done.
        stop: is asked from time to time whether to end.

    Raises:
        ValueError: there are no images, or of other channels.
        Stopped: `stop` said so, in one of the processes.
    """
    if len(images) == 0:
        raise ValueError("[pixelcnn] there are no images to be evaluated, needs 1 or more")
    if batch < 1:
        raise ValueError(f"[pixelcnn] batch is {batch}, needs 1 or more")
    device = next(model.parameters()).device
    bits = torch.zeros(1, dtype=torch.float64, device=device)
    mine = images[world.rank :: world.size]
    done = 0
    with evaluating(model):
        for part in mine.split(batch) if len(mine) else ():
            if stop():
                bits[0] = torch.nan  # so that it is in the sum over all processes
                break
            part = part.to(device)
            bits += (loss(part) if loss else loss_of(model, part, bf16)).double() * len(part)
            done += len(part)
            progress(done)
    total = float(world.sum(bits)[0])
    if math.isnan(total) and world.any(stop(), device):
        raise Stopped
    return total / len(images)


def load_model(
    path: AnyPath, device: torch.device | str = "cpu", *, averaged: bool = True
) -> tuple[PixelCNN, tuple[int, int]]:
    """The model of a checkpoint, with its averaged weights or those of its last update, and the size of its images.

    Raises:
        OSError: there is none.
        ValueError: it is damaged, of no PixelCNN++ or of other layouts, or there is no such device.
    """
    place = device_of(device)
    tensors, header = checkpoint.load(path, KIND)
    try:
        model = PixelCNN(ModelConfig(**header["model"]))
        height, width = (int(side) for side in header["size"])
        if height < 1 or width < 1:
            raise ValueError(f"its images have {height} x {width} pixels")
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"[pixelcnn] {path} describes no model: {error}") from error
    digest = model.layouts_digest()
    if header.get("layouts", digest) != digest:
        raise ValueError(f"[pixelcnn] {path} is of other layouts than this version makes of {model.config.layout}")
    checkpoint.load_weights(model, tensors, "ema." if averaged else "model.", path, KIND.op)
    return model.to(place).eval(), (height, width)
