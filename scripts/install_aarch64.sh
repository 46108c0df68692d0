#!/usr/bin/env bash
# What the preset aarch64 needs, if it is not there yet: cross compiler, emulator, GoogleTest's sources.
set -euo pipefail

if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null &&
  [ -e /usr/aarch64-linux-gnu/include/stdio.h ] && [ -e /usr/src/googletest/CMakeLists.txt ]; then
  exit 0
fi
"$(dirname "$0")/apt_install.sh" g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user googletest
