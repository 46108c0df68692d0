#!/usr/bin/env bash
# What no compiler checks: who includes whom (check_includes.py), pages that are hard to read or lead nowhere
# (check_pages.py) or are not what results make, the size of files, files that somebody left behind, copies of the version.
set -euo pipefail
failed=0
complain() { echo "$1" >&2; failed=1; }

python3 scripts/check_includes.py || failed=1
python3 scripts/check_pages.py || failed=1
python3 benchmarks/machine_pages.py --check || failed=1
while read -r lines file; do
  complain "$file has $lines lines; would two files be clearer?"
done < <(git ls-files '*.cc' '*.cu' '*.cuh' '*.h' '*.py' | xargs wc -l | awk '$2 != "total" && $1 > 450')

while read -r bytes file; do
  complain "$file has $bytes bytes; data and programs do not belong here"
done < <(git ls-files -z | xargs -0 stat -c '%s %n' | awk '$1 > 512 * 1024')

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
while read -r file; do
  complain "$file says $version; the version stands in pyproject.toml alone"
done < <(git grep -lwF "$version" -- CMakeLists.txt CITATION.cff cmake docs/conf.py include python src)

echo "lines by folder:"
git ls-files '*.cc' '*.cu' '*.cuh' '*.h' '*.inc' '*.py' | xargs wc -l | awk '$2 != "total" {n = split($2, p, "/"); k = p[1] (n > 2 ? "/" p[2] : ""); s[k] += $1} END {for (k in s) printf "  %6d %s\n", s[k], k}' | sort -k2
exit $failed
