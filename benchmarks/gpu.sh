#!/usr/bin/env bash
# Test and measure on a machine with a GPU, in one call of under nine minutes and without a network:
#
#     bash benchmarks/gpu.sh [folder of wheels to use, such as torch_scatter's]
#
# Needs torch, triton, torch_geometric and numba; the tests pytest too. Writes gpu-tests.log, attention.md and
# attention.json to $OUT, or to benchmarks/results. Fails where a test or a result does.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${OUT:-benchmarks/results}
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD/tests" PYTHONUNBUFFERED=1
status=0

if [ -n "${1:-}" ]; then
    site=$(mktemp -d)
    if python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$1"/*.whl; then
        export PYTHONPATH="$site:$PYTHONPATH"
    else
        echo "The wheels of $1 cannot be used; going on without them."
    fi
fi

if python3 -c "import pytest"; then
    tests=()
    for file in tests/test_gpu.py tests/test_attention.py tests/test_conv.py; do
        if [ -e "$file" ]; then tests+=("$file"); fi
    done
    # other versions than those that CI pins may warn of other things
    timeout 150 python3 -m pytest -q -W default -p no:cacheprovider -k "cuda or gpu" "${tests[@]}" 2>&1 |
        tee "$out/gpu-tests.log"
    tested=${PIPESTATUS[0]}
    if [ "$tested" -eq 5 ]; then echo "There are no tests for a GPU."; elif [ "$tested" -ne 0 ]; then status=1; fi
else
    echo "pytest is missing; the tests are left out."
fi

timeout $((500 - SECONDS)) python3 benchmarks/attention.py --device cuda --seconds 4 --compile 30 \
    --out "$out/attention.json" 2> >(tee "$out/attention.log" >&2) | tee "$out/attention.md" || status=1
exit $status
