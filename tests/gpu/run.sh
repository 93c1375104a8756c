#!/usr/bin/env bash
# The checks that need an NVIDIA GPU: all of tests/gpu, where a skip is a failure, and then the figures of bench.gpu.
#
#   PYTHON=python3          used as it is, with nothing set up, if it has shmsync (a wheel, or editable) and pytest;
#                           else .venv is made, as for `make test`
#   GPU_OUT=build/gpu.json  where the figures go
#
# They run in a copy of tests/gpu and bench: beside the sources, `import shmsync` would find those, without the compiled
# extension of the wheel.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(command -v "${PYTHON:-python3}")
out=$(realpath -m "${GPU_OUT:-$repo/build/gpu.json}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Away from the repository, so that only what is installed counts.
if ! (cd "$scratch" && "$python" -c 'import pytest, shmsync' 2>/dev/null); then
    make -C "$repo" PYTHON="$python" .venv/.test
    python=$repo/.venv/bin/python
fi

mkdir -p "$scratch/tests" "$(dirname "$out")"
cp -r "$repo/tests/gpu" "$scratch/tests"
cp -r "$repo/bench" "$scratch"
# A package, so that nobody else's `tests` is imported in its place.
touch "$scratch/tests/__init__.py" "$scratch/tests/gpu/__init__.py"
cd "$scratch"
"$python" -c 'import shmsync, torch; print("shmsync", shmsync.__version__, shmsync.__file__, "torch", torch.__version__)'
"$python" -c 'import shmsync; print("the extension is", "there" if shmsync.has_extension else "NOT there")'

failed=0
# Everything in there has a bound of its own; these are for the case that one of them is broken.
SHMSYNC_REQUIRE_GPU=1 timeout --kill-after=10 300 "$python" -m pytest tests/gpu -q || failed=1
printf '\n── the figures (%d s) ──\n' "$SECONDS"
timeout --kill-after=10 180 "$python" -m bench.gpu --out "$out" || failed=1
printf '── done (%d s) ──\n' "$SECONDS"
exit "$failed"
