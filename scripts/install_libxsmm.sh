#!/usr/bin/env bash
# LIBXSMM, to be measured beside us, in build/libxsmm: cloned and built if it is not there yet, which takes two minutes.
# Benchmarks go on without it where that fails.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=build/libxsmm
if [ "$(uname -m)" != x86_64 ] || [ -e "$folder/lib/libxsmm.so" ]; then
  exit 0
fi
fail() { echo "LIBXSMM is not there: $1" >&2; rm -rf "$folder"; exit 0; }

rm -rf "$folder"
timeout 120 git clone --quiet --depth 1 "${LIBXSMM_URL:-https://github.com/libxsmm/libxsmm}" "$folder" || fail "it cannot be cloned"
# AVX is left alone: with AVX=3 it gave wrong results. No BLAS, no Fortran.
make -C "$folder" STATIC=0 BLAS=0 FORTRAN=0 -j "$(nproc)" lib > "$folder/build.log" 2>&1 || fail "it cannot be built: $(tail -n 1 "$folder/build.log")"
[ -e "$folder/lib/libxsmm.so" ] || fail "its build made no lib/libxsmm.so"
