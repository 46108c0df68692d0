#!/usr/bin/env bash
# build_docs.sh OUT: API documentation from the headers (Doxygen, Breathe) and the docstrings (Sphinx) in OUT/html.
set -euo pipefail
out=$1
if ! command -v doxygen >/dev/null; then
  echo "== installing Doxygen"
  sudo=()
  if [ "$(id -u)" != 0 ]; then sudo=(sudo); fi
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" apt-get install -y -qq --no-install-recommends doxygen >/dev/null
fi
mkdir -p "$out"
(cat docs/Doxyfile; echo "OUTPUT_DIRECTORY = $out") | doxygen -
BLOCKSPARSE_DOXYGEN_XML=$(realpath "$out/xml") sphinx-build -q -W --keep-going -b html docs "$out/html"
echo "$out/html/index.html"
