#!/usr/bin/env bash
# Installs Debian's package of Fashion-MNIST, if it is not there.
set -euo pipefail
if [ ! -e /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ]; then
  "$(dirname "$0")/../../scripts/apt_install.sh" dataset-fashion-mnist
fi
