# make demo   trains M2S and SEDD on digits, samples, compares and audits them: out/demo/index.html
# make test   style, types and every test but those of make test-docs; make -j2 test checks types while tests run
# make docs   the documentation site, to be read from site/index.html; it needs node >= 20
# make test-docs   the site, its notebooks, the recipes of examples/, and pages in a browser; it needs chromium and node
# make notebooks   runs the notebooks of docs/tutorials/ and writes their outputs into them
# All of them set up .venv by themselves; they need Python 3.11 or newer (PYTHON=python3.12 chooses one). `make test
# EXTRAS=test,triton` also runs the kernels, in Triton's interpreter where there is no GPU (a GB to install).
# make faults kills, failing calls, damaged and hostile input, for FAULTS_MINUTES=30; given again, it continues
# make dist   the wheel and the source distribution of m2s-diffusion: dist/
# make gpu    the tests of what runs on a GPU, in the environment of PYTHON: torch for CUDA, triton and the test extra
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= test
FAULTS_MINUTES ?= 30
DOCS_TESTS = $(shell grep -rlE 'mark\.docs' tests --include='test_*.py')
# Some container images set it. Then each of the hundreds of processes that tests start compiles all modules of m2s again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test tests docs notebooks test-docs lint bench dist faults gpu clean

demo: $(VENV)/demo.installed
	$(BIN)/m2s demo --out out/demo

test: lint tests

tests: $(VENV)/test.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=25 --durations-min=4

docs: $(VENV)/docs.installed web/node_modules/.package-lock.json
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/docs.installed
	$(BIN)/python scripts/docs_site/run_notebooks.py docs/tutorials/*.ipynb

test-docs: $(VENV)/test.installed $(VENV)/docs.installed web/node_modules/.package-lock.json
	$(BIN)/python -m pytest -m docs -n 2 --dist worksteal --durations=15 --durations-min=4 $(DOCS_TESTS)

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
	$(PIP) torch
	@touch $@

$(VENV)/demo.installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	$(PIP) -e .
	@touch $@

$(VENV)/test.installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/docs.installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	@touch $@

web/node_modules/.package-lock.json: web/package.json web/package-lock.json
	@node -e 'process.exit(process.versions.node.split(".")[0] >= 20 ? 0 : 1)' 2>/dev/null || { \
		echo "the site needs node >= 20 with npm, for the packages of web/: install it and run make again" >&2; exit 1; }
	cd web && npm ci --no-fund --no-audit --loglevel error
	@touch $@

clean:
	rm -rf $(VENV) out build dist site web/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
