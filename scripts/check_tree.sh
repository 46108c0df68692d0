#!/usr/bin/env bash
# What no compiler checks: foreign headers below the border, the direction of includes, the size of files, and
# files that somebody left behind.
set -euo pipefail
failed=0
complain() { echo "$1" >&2; failed=1; }

if grep -rnE '#include [<"](torch|ATen|c10|Python|pybind|xla|tensorflow)' src include; then
  complain "a framework's header under src or include"
fi
if grep -rnE '#include [<"](cuda|cublas|cusparse)' include src/core src/graphs src/cpu; then
  complain "a CUDA header outside of src/cuda and the ops"
fi
if grep -rnE '#include "(ops|capi|adapters|graphs)/' src/core src/cpu --include='*.h' --include='*.cc' | grep -v test.cc; then
  complain "includes point from ops to cpu to core, not back"
fi
while read -r lines file; do
  complain "$file has $lines lines; would two files be clearer?"
done < <(git ls-files '*.cc' '*.cu' '*.cuh' '*.h' '*.py' | xargs wc -l | awk '$2 != "total" && $1 > 450')

while read -r bytes file; do
  complain "$file has $bytes bytes; data and programs do not belong here"
done < <(git ls-files -z | xargs -0 stat -c '%s %n' | awk '$1 > 512 * 1024')

echo "lines by folder:"
git ls-files '*.cc' '*.cu' '*.cuh' '*.h' '*.inc' '*.py' | xargs wc -l | awk '$2 != "total" {n = split($2, p, "/"); k = p[1] (n > 2 ? "/" p[2] : ""); s[k] += $1} END {for (k in s) printf "  %6d %s\n", s[k], k}' | sort -k2
exit $failed
