#!/usr/bin/env bash
# What needs a GPU, in stages of at most nine minutes; each is worth a visit to a GPU alone, and in
# each what is worth most comes first:
#
#     bash bench/gpu.sh STAGE [--nanogpt DIR] [--store DIR] [--commit HASH]
#
#     A  what machine it is and its ceilings; does every way to train learn what a CPU learns;
#        124M, eager and compiled, beside nanoGPT's model where DIR is a clone of it; its kernels
#     B  the tests marked gpu, on many workers; gpu-tests.xml has those that ended, even after a SIGTERM
#        (on an H200 with 16 cores A takes four minutes, B one)
#     C  steps of 350M with dropped tokens and packed rows; attention, loss and copies by themselves
#     D  offload: steps of 350M with state, gradients and weights on the host; 1.3B in 16 GiB
#     E  whole runs of 124M of two minutes each, the next three of section gpu of bench/frontier.ini
#        without a record here or in results/; on the store DIR: prepare.py FILE --tokenizer gpt2 --out DIR
#
# Its results are in $OUT (default: results): a record as soon as a variant is done, in
# gpu-NAME.jsonl, and all output in gpu-STAGE.log. Nothing is installed or fetched. A part that
# fails or runs out of time does not end the others. A SIGTERM, or the stage's last second, ends the
# part that runs; what was left out is named then. $PYTHON is the interpreter (python3). The commit is
# HASH, or git's, or what stands in a file COMMIT.
#
# GPU_FAKE=1 walks through a stage on a CPU, with toys: does the script work?
#
# Exit status: 0 if all that was to run passed, 1 if not, 2 without a GPU or for a wrong argument.

set -u -o pipefail
began=$SECONDS

say() { echo "bench/gpu.sh: $*"; }
refuse() {
    say "$*" >&2
    exit 2
}

stage=${1:-}
case $stage in
A) most=300 ;;
B) most=480 ;;
C | D | E) most=540 ;;
*) refuse "there is no stage '$stage': choose A, B, C, D or E" ;;
esac
shift
nanogpt=() stores=() store=() commit=''
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || refuse "$1 needs a value"
    case $1 in
    --nanogpt) [ -f "$2/model.py" ] || refuse "--nanogpt $2: has no model.py"
        nanogpt=(--nanogpt "$(realpath "$2")") ;;
    --store) [ -f "$2/meta.json" ] || refuse "--store $2: prepare.py made no store there"
        store=(--data "$(realpath "$2")") stores=(--stores "pd=$(realpath "$2")") ;;
    --commit) commit=$2 ;;
    *) refuse "$1 is unknown: choose --nanogpt, --store or --commit" ;;
    esac
    shift 2
done
fake=${GPU_FAKE:-}
[ "$stage$fake" != E ] || [ ${#stores[@]} -gt 0 ] || refuse "stage E needs --store DIR"
[ -z "$fake" ] || [ -n "${OUT:-}" ] || refuse "GPU_FAKE: set OUT, as toys are no results"
[ -z "${OUT:-}" ] || OUT=$(realpath -m "$OUT")
cd "$(dirname "$0")/.." || exit 2
export OUT=${OUT:-$PWD/results}
python=${PYTHON:-python3}
if [ -z "$fake" ]; then
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
        refuse "torch sees no GPU here, so nothing was run"
fi
mkdir -p "$OUT" || exit 2
[ -n "$commit" ] || commit=$(git describe --always --dirty 2>/dev/null) ||
    commit=$(cat COMMIT 2>/dev/null) || commit=none
export COMMIT=$commit PYTHONUNBUFFERED=1
# what is compiled or trained on the way goes with the stage
TMPDIR=$(mktemp -d)
export TMPDIR TRITON_CACHE_DIR=$TMPDIR/triton TORCHINDUCTOR_CACHE_DIR=$TMPDIR/inductor
export PYTHONPYCACHEPREFIX=$TMPDIR/pycache HYPOTHESIS_STORAGE_DIRECTORY=$TMPDIR/hypothesis
exec > >(trap '' TERM INT && exec tee -a "$OUT/gpu-$stage.log") 2>&1
log=$!

running='' stopped='' status=0 left_out=()
patience=${fake:+20} # a busy CPU is that much slower, even with toys
patience=${patience:-1}
stop() {
    stopped=1
    [ -z "$running" ] || kill -TERM "$running" 2>/dev/null # timeout hands it on to all it started
}
trap stop TERM INT

# part SECONDS NAME COMMAND...
part() {
    local limit=$1 name=$2 result=0 started=$SECONDS left=$((most * patience - SECONDS + began))
    shift 2
    if [ -n "$stopped" ] || [ "$left" -lt 10 ]; then
        left_out+=("$name")
        return
    fi
    say "$name: at most $limit s: ${*@Q}"
    limit=$((limit * patience < left ? limit * patience : left))
    timeout -k 5 "$limit" "$@" &
    running=$!
    wait "$running" || result=$?
    while kill -0 "$running" 2>/dev/null; do # a signal ended the waiting, and not yet the part
        result=0
        wait "$running" || result=$?
    done
    running=''
    case $result in
    0) say "$name: passed in $((SECONDS - started)) s" ;;
    124 | 137 | 143)
        say "$name: stopped after $((SECONDS - started)) s"
        left_out+=("the rest of $name")
        ;;
    *) say "$name: failed with status $result" ;;
    esac
    [ "$result" -eq 0 ] || status=1
}

bench() { # SECONDS NAME FILE FLAGS...
    local limit=$1 name=$2 file=$3
    shift 3
    part "$limit" "$name" "$python" "bench/$file.py" "$@" "${on[@]}"
}

# what is run, and what in its place if it is only to be seen whether it works
on=(--device cuda --record)
toy=() gpt=124M larger=350M kernels=() copies=(--size 350M)
# the tests that take longest first; of 16 cores 12, as some start processes of their own
tests=(gpu tests/test_offload.py tests/test_runtime.py $(grep -l mark.gpu tests/test_*.py))
workers=12
beside=("AdamW, exact GELU") kept=("keep 1/2") eager=("short pieces" "keep 3/4" "keep 1/4")
if [ -n "$fake" ]; then
    export TORCHDYNAMO_DISABLE=1 # a compiler for the CPU would take minutes
    on=(--device cpu --record)
    toy=(--toy) gpt=toy larger=toy kernels=(--size toy --turns 2) copies=("${kernels[@]}")
    tests=("not gpu and not slow" tests/test_sizes.py) workers=2
    beside=() kept=() eager=() # each variant is a process, which takes seconds to start
fi

stage_A() {
    bench 30 machine first_look machine "${toy[@]}"
    [ -z "$fake" ] || bench 100 curves first_look curves --toy # those of results/ are no toys'
    OMP_NUM_THREADS=1 bench 100 losses first_look losses "${toy[@]}"
    local step=(--size "$gpt" "${nanogpt[@]}" --variants plain "${beside[@]}")
    bench 45 "step, eager" step "${step[@]}"
    bench 25 "profile, eager" first_look profile "${toy[@]}"
    bench 70 "step, compiled" step --compile "${step[@]}"
    bench 30 "profile, compiled" first_look profile --compile "${toy[@]}"
}

# Each worker compiles its own kernels, so that compilations go on side by side. addopts of
# pyproject.toml leave out the tests marked gpu.
stage_B() {
    local flags=(-v -o addopts= -p no:cacheprovider "--junit-xml=$OUT/gpu-tests.xml")
    ! "$python" -c 'import xdist' 2>/dev/null ||
        flags+=(-n "$workers" --dist load --maxschedchunk 1)
    part 470 tests "$python" -m pytest "${flags[@]}" -m "${tests[@]}"
}

stage_C() {
    local step=(--size "$larger" --optimizer adamw --variants plain packed "${kept[@]}")
    bench 110 "step, eager" step "${step[@]}" "${eager[@]}"
    bench 110 attention operators attention "${kernels[@]}"
    bench 60 loss operators loss "${kernels[@]}"
    bench 70 copies operators copies "${copies[@]}"
    bench 190 "step, compiled" step --compile "${step[@]}"
}

stage_D() {
    local step=(--size "$larger" --optimizer adamw --variants plain offloaded "weights offloaded")
    bench 240 "offload" step "${step[@]}"
    [ -n "$fake" ] || part 200 "1.3B in 16 GiB" "$python" train.py --size 1.3B --batch-tokens 8192 \
        --tokens 80K --checkpoint-activations --offload --offload-budget 12GiB --tokenizer gpt2 \
        --eval-every 0 --checkpoint-every 0 --final-eval-tokens 20K "${store[@]}" --out "$TMPDIR/run"
}

# 60 M tokens of 124M are 916 steps of some 0.14 s on an H200 (docs/step.md). Everything on sees 64
# tokens of a row at first: 25 M on its clock read 105 M, in 1,600 steps of some 0.08 s
stage_E() {
    local runs=(runs --sections gpu --most 3)
    [ -z "$fake" ] || runs=(runs --sections toy)
    bench 530 "three runs" frontier "${runs[@]}" "${stores[@]}"
}

say "stage $stage, commit $COMMIT, $(date -u +%FT%TZ)"
"stage_$stage"
if [ ${#left_out[@]} -gt 0 ]; then
    status=1
    say "left out: $(printf '%s; ' "${left_out[@]}")"
fi
say "stage $stage ended with status $status after $((SECONDS - began)) s"
rm -rf "$TMPDIR"
exec >&- 2>&- # the log has its end before this script does
wait "$log"
exit "$status"
