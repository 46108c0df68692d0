"""A small residual network on Fashion-MNIST: dense, and block-sparse over channels, wider or deeper at equal cost.

    make fashion                                              # installs what is needed, and runs this
    python examples/fashion_mnist/train.py                    # some minutes on two cores
    python examples/fashion_mnist/train.py --data cifar-10-batches-py

All arms do about as many multiply-adds. Ctrl-C stops; what was measured until then is drawn.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from fashion import data, pictures, training
from fashion.network import ARMS
from tqdm import tqdm

import blocksparse


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="CIFAR-10: its batches, or train/ and test/")
    parser.add_argument("--epochs", type=float, help="passes over the training images (default: 1, on a GPU 10)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="a few images, smaller networks: everything once")
    parser.add_argument("--out", type=Path, default=Path("out/fashion_mnist"), help="folder of the picture")
    options = parser.parse_args()
    usable = torch.cuda.is_available() and not blocksparse.cuda_status()
    options.device = torch.device(options.device or ("cuda" if usable else "cpu"))
    if options.epochs is None:
        options.epochs = 10.0 if options.device.type == "cuda" else 1.0
    if not 0 < options.epochs < 1e6:
        parser.error(f"--epochs is {options.epochs:g}, needs a number above 0")
    return options


def main() -> int:
    """Trains the arms one after the other. Returns the exit status."""
    options = parse()
    if importlib.util.find_spec("matplotlib") is None:  # only needed at the end: better to say so now
        print("error: the picture needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    curves: list[training.Curve] = []
    try:
        name, *parts = data.load(options.data)
        if options.quick:
            parts = [data.Images(part.pixels[:1000], part.classes[:1000]) for part in parts]
        images = (parts[0].to(options.device), parts[1].to(options.device))
        run(options, curves, images)
        status = 0
    except data.DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        status = 130
    measured = [curve for curve in curves if curve.losses]
    if measured:
        path = options.out / "curves.png"
        pictures.draw(measured, f"{name}: a residual network of equal multiply-adds", path)
        print(f"\n{pictures.table(measured)}\n\n{path}")
    return status


def run(options: argparse.Namespace, curves: list[training.Curve], images: tuple[data.Images, data.Images]) -> None:
    arms = [ARMS[name].smaller() if options.quick else ARMS[name] for name in options.arms]
    steps = max(1, round(options.epochs * images[0].classes.numel() / training.BATCH))
    with tqdm(total=steps * len(arms), unit="step", smoothing=0.05) as bar:
        for arm in arms:
            curve, network = training.start(arm, images[0].pixels[0], options.seed)
            curves.append(curve)
            bar.set_description(arm.name)

            def advance(text: str) -> None:
                bar.set_postfix_str(text, refresh=False)
                bar.update()

            training.train(curve, network, images, options.epochs, advance, options.seed)
            bar.write(f"{arm.name}: {curve.accuracies[-1][1]:.2%} of test images")


if __name__ == "__main__":
    sys.exit(main())
