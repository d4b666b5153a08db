#!/usr/bin/env bash
# Test and measure on a machine with a GPU and without a network, in calls of at most nine minutes each:
#
#     bash benchmarks/gpu.sh CALL [--wheels FOLDER] [--data FOLDER]
#
# CALL, in the order in which they are worth their time:
#   first      a dozen tests, the headline operations, four layers beside PyG's and `segment`, a captured epoch, sanitizer
#   tests      the tests that need a GPU, in parallel processes
#   attention  attention alone at the headline sizes, float32 and bfloat16, with and without dropout: ours and PyG's
#   layers     whole layers: ours, PyG's eager and compiled, cuDNN's, and replayed as CUDA graphs; then what else is alone
#   training   the captured step with its nodes counted, 100 seeds of Cora, epochs of PPI and of Cora
#
# Needs torch, triton, torch_geometric, lightning and numba; the tests also pytest, hypothesis and scikit-learn. FOLDER of
# wheels: what else is to be installed, such as torch_scatter, hydra-core and nvidia-cudnn-frontend; and cudnn.tar.xz, the
# libraries of a cuDNN from 9.28 on, where torch brings an older one. FOLDER of data: PPI.tar.xz or PPI, and Planetoid; graphs without data
# are generated, and what trains on them fails. Compiled kernels are kept in .triton, or $TRITON_CACHE_DIR.
#
# Writes <date>-<machine>-*.json and .log to $OUT, or to benchmarks/results. A JSON file is written anew after every row.
# The exit status is not 0 where a test or a result of ours fails, or the time is over.
#
# TRITON_INTERPRET=1 rehearses a call without a GPU: the same commands on tiny graphs, with the kernels in Triton's
# interpreter. It writes to $OUT, or to a temporary folder.
set -uo pipefail
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
call=${1:-}
case $call in first | tests | attention | layers | training) shift ;; *) usage ;; esac
wheels='' data=''
while [ $# -ge 2 ]; do
    case $1 in --wheels) wheels=$(realpath "$2") ;; --data) data=$(realpath "$2") ;; *) usage ;; esac
    shift 2
done
[ $# -eq 0 ] || usage
cd "$(dirname "$0")/.." || exit
rehearsed=${TRITON_INTERPRET:-0}
pick() { if [ "$rehearsed" = 1 ]; then echo "$2"; else echo "$1"; fi; } # for a GPU, for a rehearsal
slower=$(pick 1 6) # the interpreter beside other processes
end=$((SECONDS + 520 * slower)) # with what comes before and after, nine minutes
# what is missing costs rows or tests, and is named before the first second is spent
for wheel in antlr4_python3_runtime hydra_core hypothesis lightning numba omegaconf pytest scikit_learn torch_scatter; do
    compgen -G "${wheels:-/nowhere}/$wheel-*.whl" >/dev/null || python3 -c "
import importlib.util, sys
names = {'antlr4_python3_runtime': 'antlr4', 'hydra_core': 'hydra', 'scikit_learn': 'sklearn'}
sys.exit(importlib.util.find_spec(names.get('$wheel', '$wheel')) is None)" || echo "--- missing: $wheel, in --wheels or installed"
done
for name in Planetoid PPI; do
    [ -n "$(compgen -G "${data:-/nowhere}/$name*")" ] || echo "--- missing: $name, in --data"
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ -z "${OUT:-}" ]; then OUT=benchmarks/results; [ "$rehearsed" = 1 ] && OUT=$(mktemp -d); fi
export OUT PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/.triton}"
mkdir -p "$OUT"

unpack() { python3 -c "import shutil, sys; shutil.unpack_archive(*sys.argv[1:])" "$@"; } # there may be no xz
if [ -n "$wheels" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/site" "$wheels"/*.whl || exit
    PYTHONPATH="$PYTHONPATH:$scratch/site"
    if [ -e "$wheels/cudnn.tar.xz" ]; then
        unpack "$wheels/cudnn.tar.xz" "$scratch/cudnn" || exit
        export CUDNN_LIBRARIES="$scratch/cudnn"
    fi
fi
if [ -n "$data" ]; then
    mkdir "$scratch/data"
    for name in Planetoid PPI; do
        if [ -d "$data/$name" ]; then cp -r "$data/$name" "$scratch/data"; fi
        if [ -e "$data/$name.tar.xz" ]; then unpack "$data/$name.tar.xz" "$scratch/data" || exit; fi
    done
    export GAT_PYG_DATA="$scratch/data"
fi
prefix=$OUT/$(python3 benchmarks/machine.py) || exit
log=$prefix-$call.log
: >"$log"
status=0

# run SECONDS COMMAND...: at most so long, and no longer than the call may take
run() {
    local limit=$(($1 * slower)) begin=$SECONDS
    if [ "$limit" -gt $((end - SECONDS)) ]; then limit=$((end - SECONDS)); fi
    shift
    echo "--- $*" | tee -a "$log"
    if [ "$limit" -lt 5 ]; then echo "--- no time is left" | tee -a "$log"; status=1; return; fi
    timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$log" # pytest sums up what it has so far
    local ended=${PIPESTATUS[0]}
    echo "--- exit status $ended after $((SECONDS - begin)) s" | tee -a "$log"
    if [ "$ended" -ne 0 ]; then status=1; fi
}

case $call in
first) # in order of worth; each row is written as soon as it is measured
    chosen='test_the_kernels_are_the_reference and (additive or pair or gatv2) or test_half_precision or test_captured_in_a_graph'
    chosen="$chosen or test_a_stack_of_several_slabs or test_a_replayed_step_is_a_computed_step_on_a_gpu or test_sums_over_non_zeros"
    chosen="$chosen or test_a_batch_of_features_is_compiled or test_segment_is_the_reference"
    parallel=()
    if python3 -c "import xdist" 2>/dev/null; then parallel=(-n "$(pick 12 1)" --dist worksteal); fi
    run 90 python3 -m pytest -q -W default -p no:cacheprovider --continue-on-collection-errors "${parallel[@]}" \
        -k "$(pick "$chosen" test_a_stack_of_several_slabs)" \
        tests/attention/test_{attention,fused,numbers,gpu,gpu_features}.py tests/training/test_cuda_graphs.py
    run 150 python3 benchmarks/attention.py --name first --seconds "$(pick 4 60)" --rounds "$(pick 30 1)" \
        --ways pyg auto segment --cases products-alone-8x8 products-alone-8x8-bf16-dropout arxiv-alone-4x256 cora-alone-8x8
    run 120 python3 benchmarks/attention.py --name first-layers --seconds "$(pick 4 60)" --rounds "$(pick 30 1)" \
        --ways pyg auto segment --cases arxiv ppi-2 edges-GATv2-16 molecules-GAT-8
    run 90 python3 benchmarks/training.py --captured
    if command -v compute-sanitizer >/dev/null; then
        run 60 compute-sanitizer --error-exitcode 1 python3 -m pytest -q -x -p no:cacheprovider \
            -k test_a_stack_of_several_slabs tests/attention/test_gpu.py
    else
        echo "--- compute-sanitizer is not installed" | tee -a "$log"
    fi
    ;;
tests)
    parallel=()
    if python3 -c "import xdist" 2>/dev/null; then parallel=(-n "$(pick 12 1)" --dist worksteal); fi
    # other versions than those that CI pins may warn of other things; a missing package costs its file alone
    run 525 python3 -m pytest -v -W default -p no:cacheprovider --continue-on-collection-errors "${parallel[@]}" \
        -m "not compiles" \
        -k "$(pick 'gpu or cuda or triton or nccl' 'test_odd_sizes or test_half_precision or (gpu or cuda) and not test_gpu.py')" \
        tests/attention/test_{gpu,gpu_features,gpu_launches,fused,numbers,vmap}.py tests/{graph/test_edges,features/test_features,distributed/test_halo}.py \
        tests/{seeds/test_seeds,training/test_training,training/test_cuda_graphs}.py
    ;;
attention)
    run 525 python3 benchmarks/attention.py --name attention --seconds "$(pick 4 60)" --rounds "$(pick 50 1)" \
        --ways pyg auto "auto, CUDA graph" \
        --cases 'products-alone-8x8*' 'reddit-alone-8x8*' 'arxiv-alone-4x256*' 'cora-alone-8x8*'
    ;;
layers)
    run 525 python3 benchmarks/attention.py --name layers --seconds "$(pick 4 60)" --rounds "$(pick 50 1)" \
        --compile 30 --cases cora arxiv ppi-1 ppi-2 products reddit pubmed citeseer ppi-1-gatv2 \
        'ppi-alone*' 'arxiv-alone-[38]*' arxiv-alone-4x64 'products-alone-4*' 'reddit-alone-4*'
    ;;
training)
    run 90 python3 benchmarks/training.py --captured
    run 250 python3 benchmarks/seeds.py --seeds "$(pick 100 2)" --single "$(pick 2 1)" --bare "$(pick 2 1)" \
        $(pick "" "--max-epochs 2 --within 100")
    run 150 python3 benchmarks/inductive.py --epochs "$(pick 3 1)"
    run 120 python3 benchmarks/training.py --epochs "$(pick 150 2)" --rounds "$(pick 3 1)"
    ;;
esac
exit $status
