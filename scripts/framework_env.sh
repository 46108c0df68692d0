#!/usr/bin/env bash
# framework_env.sh NAME COMMAND...: runs a command in an environment of its own, with what scripts/requirements/NAME.txt
# asks for and nothing else: versions of frameworks fight, and a front end is to work where no other one is installed.
#
#   scripts/framework_env.sh tensorflow python -m pytest tests/python/test_tensorflow_*.py
#
# It lies in .venv/frameworks/NAME (VENV: another place of .venv) and is made again when the file has changed. The
# package is the one that is installed in .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1
shift
main=$(realpath "${VENV:-.venv}")
requirements=scripts/requirements/$name.txt
folder=$main/frameworks/$name
site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if ! cmp --silent "$requirements" "$folder/.made"; then
  echo "== making an environment for $name"
  rm -rf "$folder"
  python3 -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet -r "$requirements"
  cp "$requirements" "$folder/.made"
fi
ln -sfn "$(site_packages "$main")/blocksparse" "$(site_packages "$folder")/blocksparse"
export PATH=$folder/bin:$PATH
exec "$@"
