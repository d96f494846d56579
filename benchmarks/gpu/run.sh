#!/usr/bin/env bash
# Measures on a machine with one GPU, with the Python and torch that it has, and writes six files to $OUT.
#
#   bash benchmarks/gpu/run.sh                         # $OUT is benchmarks/results/gpu unless it is set
#   LIMIT=500 bash benchmarks/gpu/run.sh --only kills  # other options are those of benchmarks/gpu
#
# On a machine without a network, put the wheels of what it lacks into .whl/ before (often msgspec alone):
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#     --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d .whl msgspec
# The files are whole after each run, so a machine that is taken away leaves what was measured until then.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
export OUT=${OUT:-$PWD/benchmarks/results/gpu} PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if compgen -G '.whl/*.whl' >/dev/null; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/site" .whl/*.whl || exit 1
  export PYTHONPATH=$PYTHONPATH:$scratch/site
fi
"$python" - <<'END' || exit 1
import importlib.util, sys
needed = ("torch", "msgspec", "typer", "rich", "psutil", "pynvml", "grpc")
if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
    sys.exit(f"missing: {', '.join(missing)}. Install them, or put their wheels into .whl/ (see the head of this file).")
END
# The six files: gpu.json, gpu.md, gpu.png, gpu.jsonl, recorded.tar.gz, console.log. What is recorded is many files more.
"$python" benchmarks/gpu --output "$OUT" --recorded "$scratch/recorded" --limit "${LIMIT:-360}" "$@" 2>&1 |
  tee "$OUT/console.log"
