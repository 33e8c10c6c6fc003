# Inside an activated virtual environment; another interpreter: make check PYTHON=python3.12

PYTHON ?= python
STAGE ?= A

.DEFAULT_GOAL := help
.PHONY: help train test check faults bench gpu

help:  ## this list
	@awk -F ':  ## ' '/^[a-z]+:  ## / { printf "%-7s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train:  ## the first command of the README: minutes on a laptop
	$(PYTHON) -m torch.distributed.run train.py --curriculum seqlen --ltd --pack

test:  ## everything that is not slow and needs no GPU
	$(PYTHON) -m pytest

check:  ## what a change must pass besides the tests: lint, format, size, imports, documents
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pytest -m structure

faults:  ## break things on purpose, for minutes: docs/reliability.md
	$(PYTHON) -m pytest -m faults

bench:  ## kernels, training steps (NANOGPT=its clone)
	$(PYTHON) bench/operators.py
	$(PYTHON) bench/step.py $(if $(NANOGPT),--nanogpt $(NANOGPT))

gpu:  ## one stage of what needs a GPU (STAGE=A to E); records in results/gpu-*.jsonl
	bash bench/gpu.sh $(STAGE) $(if $(NANOGPT),--nanogpt $(NANOGPT))
