#!/usr/bin/env bash
# apt_install.sh PACKAGE...: installs packages of Debian or Ubuntu; without root they have to be there already.
set -euo pipefail

echo "== installing $*"
if ! command -v apt-get >/dev/null; then
  echo "there is no apt-get: install what this system has in their place" >&2
  exit 1
fi
sudo=()
if [ "$(id -u)" != 0 ]; then sudo=(sudo); fi
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null
