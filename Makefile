# `make demo` and `make test` set everything up by themselves; running them again skips what is done.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup compiled demo test others lines conformance lint reference bench bench-quick bench-full gpu-rehearse clean

help:            ## show this help
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: .venv/.ready  ## build .venv from pinned requirements (about 100 s, once)

.venv/.ready: requirements/cpu.lock scripts/setup.py pyproject.toml
	@$(PYTHON) scripts/setup.py

compiled: setup  ## compile the hot policies and the simulator's devices (an option, about a minute; needs a C compiler)
	@$(BIN)/python scripts/compile_policies.py $(ARGS)

demo: setup      ## run the main job on this machine and write out/demo/report.html
	@$(BIN)/rose demo $(ARGS)

.venv/.models: .venv/.ready tests/model_infos.py
	@$(BIN)/python -m tests.model_infos && touch $@

# Images often forbid bytecode; without it each of the tests' many processes compiles our modules again, and each run the tests.
test: setup .venv/.models  ## run all tests; lists the ones that need a GPU and were skipped
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder $(ARGS)

others: setup    ## the tests with other frameworks' packages (verifiers, verl), each in an environment of its own (a minute each, once)
	@$(BIN)/python scripts/others.py $(ARGS)

lines: setup     ## run the plugin's tests on vLLM's other supported line, in an environment of its own (nightly; long)
	@$(BIN)/python scripts/others.py vllm-0.31

bench: setup     ## run the benchmarks (about an hour) and keep their figures in benchmarks/results/
	@$(BIN)/python benchmarks/run.py $(ARGS)

bench-quick: setup  ## the same at a tenth of the size, under five minutes
	@$(BIN)/python benchmarks/run.py --quick $(ARGS)

bench-full: setup  ## also the long ones; goes on where it was stopped
	@$(BIN)/python benchmarks/run.py --full $(ARGS)

gpu-rehearse: setup  ## rehearse the minutes on a GPU: CPU engines, and a stand-in for the driver (under 15 minutes)
	@rm -rf out/gpu_rehearsal
	@$(BIN)/python benchmarks/gpu_check.py --rehearse --until 900 --out out/gpu_rehearsal $(ARGS)

conformance: setup  ## real engines: options, faults, every shape of model x every feature (about an hour; goes on where it was stopped)
	@$(BIN)/python -m pytest -m conformance
	@ROSE_TEST_VERSIONS=5000 $(BIN)/python -m pytest -m "" -k "random or every_type or 200" tests/plugin/test_weights_layouts.py \
		tests/plugin/test_weights_any_tensor.py tests/plugin/test_weights_versions_engine.py
	@$(BIN)/python benchmarks/conformance.py --resume $(ARGS)

lint: setup      ## ruff, pyright, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports

reference: setup ## write the API reference, out/reference/index.html, from docstrings and routes
	@$(BIN)/python scripts/reference.py

clean:           ## remove .venv, caches and out/
	rm -rf .venv out build rose/_compiled *.egg-info
