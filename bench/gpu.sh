#!/usr/bin/env bash
# Run all that needs a GPU, in stages of at most nine minutes. Each stage is useful alone, and each
# does the most valuable parts first:
#
#     bash bench/gpu.sh STAGE [--nanogpt DIR] [--store DIR] [--commit HASH]
#
#     A  describe the machine and measure its ceilings; check that every way to train learns what a
#        CPU learns; time and profile steps of 124M, eager and compiled, and nanoGPT's model if DIR
#        is a clone of it
#     B  run the tests marked gpu, on many workers; gpu-tests.xml lists those that ended, even after
#        a SIGTERM (on an H200 with 16 cores A takes four minutes, B one)
#     C  time steps of 350M with dropped tokens and packed rows; attention, loss and copies alone
#     D  offload: steps of 350M with state, gradients and weights on the host; 1.3B in 16 GiB
#     E  train 124M in runs of two minutes: the next three of section gpu in bench/frontier.ini that
#        have no record in $OUT or results/; DIR is a store that was made by
#        prepare.py FILE --tokenizer gpt2 --out DIR
#
# Results go to $OUT (default: results): records to gpu-NAME.jsonl, each when its variant is done,
# and all output to gpu-STAGE.log. Nothing is installed or downloaded. If a part fails or runs out
# of time, the others continue. A SIGTERM, or the end of the stage's time, stops the running part,
# and the script lists what was left out. $PYTHON is the interpreter (default: python3). The commit
# is HASH, or else git's, or else the content of a file COMMIT.
#
# GPU_FAKE=1 runs a stage with toy models on a CPU, to test this script.
#
# Exit status: 0 if all parts passed, 1 if not, 2 without a GPU or for a wrong argument.

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
    --nanogpt) [ -f "$2/model.py" ] || refuse "--nanogpt $2 has no model.py: clone nanoGPT"
        nanogpt=(--nanogpt "$(realpath "$2")") ;;
    --store) [ -f "$2/meta.json" ] || refuse "--store $2 is not a store: make one with prepare.py"
        store=(--data "$(realpath "$2")") stores=(--stores "pd=$(realpath "$2")") ;;
    --commit) commit=$2 ;;
    *) refuse "$1 is unknown: choose --nanogpt, --store or --commit" ;;
    esac
    shift 2
done
fake=${GPU_FAKE:-}
[ "$stage$fake" != E ] || [ ${#stores[@]} -gt 0 ] || refuse "stage E needs --store DIR"
[ -z "$fake" ] || [ -n "${OUT:-}" ] || refuse "GPU_FAKE needs OUT, to keep toys out of results/"
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
# compiled code and runs are deleted at the end of the stage
TMPDIR=$(mktemp -d)
export TMPDIR TRITON_CACHE_DIR=$TMPDIR/triton TORCHINDUCTOR_CACHE_DIR=$TMPDIR/inductor
export PYTHONPYCACHEPREFIX=$TMPDIR/pycache HYPOTHESIS_STORAGE_DIRECTORY=$TMPDIR/hypothesis
exec > >(trap '' TERM INT && exec tee -a "$OUT/gpu-$stage.log") 2>&1
log=$!

running='' stopped='' status=0 left_out=()
patience=${fake:+20} # a busy CPU is this many times slower, even with toys
patience=${patience:-1}
stop() {
    stopped=1
    [ -z "$running" ] || kill -TERM "$running" 2>/dev/null # timeout passes it on to its children
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
    while kill -0 "$running" 2>/dev/null; do # a signal has ended `wait`, but not yet the part
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

# the arguments of a real stage, and below those of a fake one
on=(--device cuda --record)
toy=() gpt=124M larger=350M kernels=() copies=(--size 350M)
# Start with the tests that take longest. Use 12 of 16 cores, because some start more processes.
tests=(gpu tests/test_offload.py tests/test_runtime.py $(grep -l mark.gpu tests/test_*.py))
workers=12
beside=("AdamW, exact GELU") kept=("keep 1/2") eager=("short pieces" "keep 3/4" "keep 1/4")
if [ -n "$fake" ]; then
    export TORCHDYNAMO_DISABLE=1 # compiling for the CPU would take minutes
    on=(--device cpu --record)
    toy=(--toy) gpt=toy larger=toy kernels=(--size toy --turns 2) copies=("${kernels[@]}")
    tests=("not gpu and not slow" tests/test_sizes.py) workers=2
    beside=() kept=() eager=() # few variants, because each is a process that takes seconds to start
fi

stage_A() {
    bench 30 machine first_look machine "${toy[@]}"
    [ -z "$fake" ] || bench 100 curves first_look curves --toy # results/ has none for toys
    OMP_NUM_THREADS=1 bench 100 losses first_look losses "${toy[@]}"
    local step=(--size "$gpt" "${nanogpt[@]}" --variants plain "${beside[@]}")
    bench 45 "step, eager" step "${step[@]}"
    bench 25 "profile, eager" first_look profile "${toy[@]}"
    bench 70 "step, compiled" step --compile "${step[@]}"
    bench 30 "profile, compiled" first_look profile --compile "${toy[@]}"
}

# Each worker compiles its own kernels, so compilations run in parallel. `-o addopts=` is needed
# because addopts in pyproject.toml exclude the tests marked gpu.
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

# With 124M, 60 M tokens are 916 steps of about 0.14 s on an H200 (results/gpu-step.jsonl). With all
# techniques on, dropping layers keep 64 tokens of a row at first, so 25 M consumed tokens are 105 M
# tokens read, in 1,600 steps of about 0.08 s.
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
