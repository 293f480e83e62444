# make demo   set up, train a small model on addition, show what it learned
# make test   set up, run the tests
# make test-vllm   the same for the tests that need a real vLLM
PYTHON ?= python3
# The build of PyTorch. On Linux, pip brings CUDA with most releases; set TORCH to the build you want.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2
export PIP_NO_COMPILE = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
DEMO ?= configs/demo.yaml
ARGS ?=

.PHONY: demo test test-vllm test-vllm-parallel lint bench-trl clean

demo: $(MODEL)/config.json
	$(BIN)/verl train $(DEMO) --overwrite $(ARGS)

test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# Needs vLLM for CPUs, which wants other versions of some packages: an environment on top of the other has those.
VLLM := .venv-vllm
test-vllm: $(VLLM)/ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -k vllm tests/rollout/test_vllm.py tests/rollout/test_vllm_parallel.py \
		tests/trainer/test_engines_outside.py tests/trainer/test_environment.py $(ARGS)

# And with engines over two devices in whole runs, which takes minutes and isn't part of CI.
test-vllm-parallel: $(VLLM)/ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/rollout/test_vllm_parallel_runs.py $(ARGS)

$(VLLM)/ready: requirements-vllm.lock $(VENV)/dev
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv --without-pip $(VLLM)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$($(VLLM)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/verl-base.pth
	xargs -n 24 < $< | xargs -P 3 -I {} sh -c '$(BIN)/pip --python $(VLLM)/bin/python install -q --no-deps --ignore-installed {}'
	touch $@

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The locks are complete, so nothing has to be resolved and several pips can install side by side;
# the last call installs this package and checks that nothing is missing.
INSTALL = { echo "$(TORCH)"; cat $(1) | xargs -n 20; } | xargs -P 3 -I {} sh -c '$(BIN)/pip install -q --no-deps {}'

$(VENV)/core: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(call INSTALL,requirements.lock)
	PYTHONWARNINGS=ignore $(BIN)/pip install -q --no-build-isolation -c requirements.lock $(TORCH) -e .
	touch $@

$(VENV)/dev: $(VENV)/core requirements-dev.lock
	$(call INSTALL,requirements-dev.lock)
	PYTHONWARNINGS=ignore $(BIN)/pip install -q --no-build-isolation -c requirements.lock -c requirements-dev.lock $(TORCH) -e '.[dev]'
	touch $@

$(MODEL)/config.json: $(VENV)/core
	TQDM_DISABLE=1 $(BIN)/python examples/prepare_smollm2.py $(MODEL)

# Seconds per step beside TRL, which gets an environment of its own.
bench-trl: $(MODEL)/config.json
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install -q $(TORCH) trl==1.16.0
	$(BIN)/python benchmarks/vs_trl_cpu.py --trl .venv-trl/bin/python $(ARGS)

clean:
	rm -rf $(VENV) .venv-trl $(VLLM) models runs
