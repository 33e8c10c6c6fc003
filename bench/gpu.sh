#!/usr/bin/env bash
# Everything that needs a GPU: the tests marked gpu, then each kernel and step bench with
# --device cuda, whose records are added to results/gpu-*.jsonl. Exit status 2 without a GPU.
#
#     bench/gpu.sh                       # some minutes
#     bench/gpu.sh --nanogpt ../nanoGPT  # arguments go to bench/step.py

set -eu -o pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "bench/gpu.sh: torch sees no GPU here, so nothing was run" >&2
    exit 2
fi

status=0
"$python" -m pytest -n 0 -m gpu || status=$?
if [ "$status" -ne 0 ] && [ "$status" -ne 5 ]; then # 5: no test is marked gpu yet
    exit "$status"
fi
"$python" bench/kernels.py --device cuda --record
"$python" bench/gather_scatter.py --device cuda --record
"$python" bench/step.py --device cuda --record "$@"
