#!/usr/bin/env bash
# GoogleTest from the system's packages, if it is not there yet; without root it has to be there.
set -euo pipefail

if [ -n "$(find /usr/include /usr/local/include -path '*gtest/gtest.h' -print -quit 2>/dev/null)" ]; then
  exit 0
fi
echo "== installing GoogleTest"
if ! command -v apt-get >/dev/null; then
  echo "GoogleTest is missing and there is no apt-get: install it (libgtest-dev, gtest-devel, googletest)" >&2
  exit 1
fi
sudo=()
if [ "$(id -u)" != 0 ]; then sudo=(sudo); fi
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" apt-get install -y -qq --no-install-recommends libgtest-dev >/dev/null
