#!/usr/bin/env bash
# GoogleTest from the system's packages (libgtest-dev, gtest-devel, googletest), if it is not there yet.
set -euo pipefail

if [ -n "$(find /usr/include /usr/local/include -path '*gtest/gtest.h' -print -quit 2>/dev/null)" ]; then
  exit 0
fi
"$(dirname "$0")/apt_install.sh" libgtest-dev
