# make demo      the main job: a fault without fxsafe, and its absence with each fix; then doctor; then a drafter, trained in
#                threads and put to the test (eight minutes on two cores)
# make test      the test suite;  TORCH=2.14.1 chooses another release
# make test-threads  ordinary uses of torch.fx and what stands on it, each test in four threads at once
# make test-dflash  the trainer's own tests
# make test-recipes  the scripts of docs/recipes.md that need libraries
# make test-transformers4  the tracer that transformers had up to 4, on one of its releases
# make lint      style, types
# make bench     what fxsafe costs, as ratios
# make soak      everything that traces, at once, for MINUTES (10), every result compared with a serial run
# make matrix    the suite on every supported release, one at a time; writes docs/matrix.md
PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv-$(TORCH)
READY := $(VENV)/.ready
DFLASH_VENV ?= .venv-dflash-$(TORCH)
DFLASH_READY := $(DFLASH_VENV)/.ready
ARGS ?=
MINUTES ?= 10

.PHONY: demo test test-threads test-dflash test-recipes test-transformers4 lint bench soak matrix clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fxsafe needs Python 3.10 or newer; say make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet torch==$(TORCH)
	$(VENV)/bin/python -m pip install --quiet --editable '.[test,lint]'
	touch $@

# The trainer needs its extra, in an environment of its own, so that the suite shows that the core does without. Its tests
# also want the package that its exports are for, and what the numbers of a run can be sent to.
$(DFLASH_READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fxsafe needs Python 3.10 or newer; say make PYTHON=...")'
	$(PYTHON) -m venv $(DFLASH_VENV)
	$(DFLASH_VENV)/bin/python -m pip install --quiet torch==$(TORCH)
	$(DFLASH_VENV)/bin/python -m pip install --quiet --editable '.[test,dflash]' tensorboard wandb
	$(DFLASH_VENV)/bin/python -m pip install --quiet --no-deps dflash==0.1.0
	touch $@

demo: $(DFLASH_READY)
	$(DFLASH_VENV)/bin/python examples/demo.py
	$(DFLASH_VENV)/bin/python -m fxsafe doctor
	$(DFLASH_VENV)/bin/python -m fxsafe dflash demo --out build/dflash-demo

test: $(READY)
	$(VENV)/bin/python -m pytest -n 2 $(ARGS)

test-threads: $(READY)
	$(VENV)/bin/python -m pytest --parallel-threads=4 tests/test_ordinary_use.py $(ARGS)

test-dflash: $(DFLASH_READY)
	$(DFLASH_VENV)/bin/python -m pytest tests/dflash $(ARGS)

test-recipes: pyproject.toml
	test -d .venv-recipes || $(PYTHON) -m venv .venv-recipes
	.venv-recipes/bin/python -m pip install --quiet torch==$(TORCH)
	.venv-recipes/bin/python -m pip install --quiet --editable '.[test,recipes]'
	.venv-recipes/bin/python -m pytest tests/recipes $(ARGS)

test-transformers4: pyproject.toml
	test -d .venv-transformers4 || $(PYTHON) -m venv .venv-transformers4
	.venv-transformers4/bin/python -m pip install --quiet torch==$(TORCH)
	.venv-transformers4/bin/python -m pip install --quiet --editable '.[test]' 'transformers==4.46.3'
	.venv-transformers4/bin/python -m pytest tests/transformers4 $(ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(READY)
	$(VENV)/bin/python benchmarks/core.py $(ARGS)
	$(VENV)/bin/python benchmarks/isolation.py $(ARGS)

soak: $(READY)
	$(VENV)/bin/python -W ignore tools/soak.py --minutes $(MINUTES) $(ARGS)

matrix:
	$(PYTHON) tools/matrix.py $(ARGS)

clean:
	rm -rf .venv-* .matrix .mypy_cache .ruff_cache .pytest_cache .hypothesis
