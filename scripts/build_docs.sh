#!/usr/bin/env bash
# build_docs.sh OUT: the site in OUT/html: guides (MyST), the API from headers (Doxygen, Breathe) and docstrings.
set -euo pipefail
out=$1
command -v doxygen >/dev/null || scripts/apt_install.sh doxygen
mkdir -p "$out"
(cat docs/Doxyfile; echo "OUTPUT_DIRECTORY = $out") | doxygen -
BLOCKSPARSE_DOXYGEN_XML=$(realpath "$out/xml") sphinx-build -q -W --keep-going -b html docs "$out/html"
echo "$out/html/index.html"
