# Run inside an activated virtual environment, or name an interpreter: make check PYTHON=python3.12

PYTHON ?= python
STAGE ?= A

.DEFAULT_GOAL := help
.PHONY: help train test check faults bench gpu

help:  ## print this list
	@awk -F ':  ## ' '/^[a-z]+:  ## / { printf "%-7s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train:  ## run the README's first command, which takes minutes on a laptop
	$(PYTHON) -m torch.distributed.run train.py --curriculum seqlen --ltd --pack

test:  ## run all tests that are fast and need no GPU
	$(PYTHON) -m pytest

check:  ## check what a change must pass besides the tests: lint, format, size, imports, documents
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pytest -m structure

faults:  ## break things on purpose, which takes minutes: docs/reliability.md
	$(PYTHON) -m pytest -m faults

bench:  ## time kernels and training steps (NANOGPT=path of a clone, to compare)
	$(PYTHON) bench/operators.py
	$(PYTHON) bench/step.py $(if $(NANOGPT),--nanogpt $(NANOGPT))

gpu:  ## run one stage of what needs a GPU (STAGE=A to E); records go to results/gpu-*.jsonl
	bash bench/gpu.sh $(STAGE) $(if $(NANOGPT),--nanogpt $(NANOGPT))
