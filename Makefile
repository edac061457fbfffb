# make demo   trains M2S and SEDD on digits, samples, compares and audits them: out/demo/index.html
# make test   style, types and every test but those of make test-docs
# make test-docs   the recipes of examples/, and pages in a browser; those fail where there is no chromium
# All three set up .venv by themselves; they need Python 3.11 or newer (PYTHON=python3.12 chooses one). `make test
# EXTRAS=test,triton` also runs the kernels, in Triton's interpreter where there is no GPU (a GB to install).
# make faults kills, failing calls, damaged and hostile input, for FAULTS_MINUTES=30; given again, it continues
# make dist   the wheel and the source distribution of m2s-diffusion: dist/
# make gpu    the tests of what runs on a GPU, in the environment of PYTHON: torch for CUDA, triton and the test extra
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= test
FAULTS_MINUTES ?= 30

.PHONY: demo test test-docs lint bench dist faults gpu clean

demo: $(VENV)/demo.installed
	$(BIN)/m2s demo --out out/demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=25 --durations-min=4

test-docs: $(VENV)/test.installed
	$(BIN)/python -m pytest -m docs

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/test.installed
	$(BIN)/m2s benchmark direct-loss bisection --device cpu
	$(BIN)/m2s benchmark dense-step --device cpu --rows 1024 --vocab 50257 --repeats 5

dist: $(VENV)/test.installed
	$(BIN)/python -m build --no-isolation --outdir dist

faults: $(VENV)/test.installed
	$(BIN)/python -m tests.faults --minutes $(FAULTS_MINUTES)

gpu:
	$(PYTHON) -m pytest -n 8 tests/ops tests/test_devices.py tests/training/test_trainer.py tests/training/test_max_masked.py \
		tests/training/test_fused_training.py tests/samplers/test_memory.py

$(VENV)/pip.installed:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "m2s needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	@touch $@

$(VENV)/demo.installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/test.installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
