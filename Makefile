# Every target sets up what it needs in a virtual environment of its own, and only when that is missing or out of date.
# Needs Python 3.10 or newer and git; `make help` lists the targets.

PYTHON ?= python3
# The pip requirement for PyTorch, installed before everything else: make test TORCH=torch==2.13.0
TORCH ?= torch
# The releases that the tests were run with, PyTorch's among them, are the ones installed: make test LOCKED= takes the
# newest where nothing is installed yet.
LOCKED ?= constraints.txt
# The oldest supported Transformers, for test-compat.
TRANSFORMERS_OLDEST ?= transformers==5.17.0
# More arguments for pytest: make test PYTEST_ARGS="tests/tokenization -k padding"
PYTEST_ARGS ?=
# More arguments for scripts/quickstart.py: make demo DEMO_ARGS="--output runs/mine"
DEMO_ARGS ?=
# Test processes, one thread each.
WORKERS ?= logical
MAX_WORKERS ?= 4

VENV := .venv
NEWEST := .venv-newest
COMPAT := .venv-compat
TRL := .venv-trl
LM_EVAL := .venv-lm-eval
# For test-triton: what the oldest supported PyTorch pins, what PyTorch 2.13 and 2.14 pin, and the newest.
TRITON := .venv-triton
TRITONS := 3.3.0 3.7.1 3.8.0 newest

PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
ONE_THREAD = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PARALLEL = -n $(WORKERS) --maxprocesses $(MAX_WORKERS) --dist worksteal
# Not what only PyTorch does with a kernel.
TRITON_TESTS = -m "not gpu" -k "(interpreter or ahead_of_time or kernel or generated) and not traced" \
	tests/modeling_engram/ops tests/optim/test_row_updates.py
COMPAT_TESTS = tests/configuration tests/convert tests/modeling_engram tests/tokenization

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-gpu test-rounding test-compat test-newest test-triton test-upstream \
	test-upstream-compat test-clients lock lint format clean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  variables: PYTHON=python3.12  TORCH=torch==2.13.0  LOCKED=  PYTEST_ARGS='-k name'  DEMO_ARGS='--output dir'  WORKERS=2"

demo: $(VENV)/.demo ## run the quick start (scripts/quickstart.py)
	$(VENV)/bin/python scripts/quickstart.py $(DEMO_ARGS)

test: $(VENV)/.dev ## run the tests, without those marked slow or gpu
	$(ONE_THREAD) $(VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-all: $(VENV)/.dev ## run the tests, the slow ones too
	$(ONE_THREAD) $(VENV)/bin/python -m pytest $(PARALLEL) -m "not gpu" $(PYTEST_ARGS)

test-gpu: $(VENV)/.dev ## run the tests that need a GPU
	$(VENV)/bin/python -m pytest -m gpu $(PYTEST_ARGS)

# What a test says must not depend on how a processor rounds: the vectors that PyTorch, oneDNN, MKL and NumPy use, the
# threads that a sum is split over, and MKL's kernels for all processors.
test-rounding: $(VENV)/.dev ## run the tests as four kinds of processors round, one after the other
	$(call rounding,1,ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41)
	$(call rounding,2,ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2)
	$(call rounding,1,ATEN_CPU_CAPABILITY=avx512)
	$(call rounding,2,MKL_CBWR=COMPATIBLE)

rounding = OMP_NUM_THREADS=$(1) MKL_NUM_THREADS=$(1) TOKENIZERS_PARALLELISM=false $(2) \
		$(VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-newest: $(NEWEST)/.dev ## run the tests on the newest release of everything
	$(ONE_THREAD) $(NEWEST)/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-compat: $(COMPAT)/.test ## run the model, generation and Hub tests on the oldest supported Transformers
	$(ONE_THREAD) $(COMPAT)/bin/python -m pytest $(PARALLEL) $(COMPAT_TESTS) $(PYTEST_ARGS)

test-triton: $(TRITONS:%=$(TRITON)-%/.test) ## run and compile the kernels with four releases of Triton
	@set -e; for release in $(TRITONS); do \
		$(TRITON)-$$release/bin/python -c 'import triton; print("Triton", triton.__version__)'; \
		$(ONE_THREAD) $(TRITON)-$$release/bin/python -m pytest $(PARALLEL) $(TRITON_TESTS) $(PYTEST_ARGS); \
	done

test-upstream: $(VENV)/.dev ## run Transformers' own tests over our classes
	$(VENV)/bin/python tests/upstream/fetch.py
	$(ONE_THREAD) $(VENV)/bin/python -m pytest $(PARALLEL) tests/upstream $(PYTEST_ARGS)

test-upstream-compat: $(COMPAT)/.test ## the same, with the oldest supported Transformers
	$(COMPAT)/bin/python tests/upstream/fetch.py
	$(ONE_THREAD) $(COMPAT)/bin/python -m pytest $(PARALLEL) tests/upstream $(PYTEST_ARGS)

test-clients: $(VENV)/.dev $(TRL)/.client $(LM_EVAL)/.client ## run the tests of pipelines, TRL and lm_eval
	$(ONE_THREAD) $(VENV)/bin/python -m pytest tests/clients/test_pipeline.py $(PYTEST_ARGS)
	$(ONE_THREAD) $(TRL)/bin/python -m pytest tests/clients/test_trl.py tests/clients/test_sft_example.py $(PYTEST_ARGS)
	$(ONE_THREAD) $(LM_EVAL)/bin/python -m pytest tests/clients/test_lm_eval.py $(PYTEST_ARGS)

lock: test-newest ## run the tests on the newest of everything; once they pass, these releases are the lock
	$(NEWEST)/bin/python .ci/lock.py write > constraints.txt.new
	mv constraints.txt.new constraints.txt

lint: $(VENV)/.dev ## check style and formatting
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .

format: $(VENV)/.dev ## mend what ruff can mend
	$(VENV)/bin/python -m ruff check --fix .
	$(VENV)/bin/python -m ruff format .

clean: ## remove the virtual environments, caches and build outputs
	rm -rf $(VENV) $(NEWEST) $(COMPAT) $(TRITON)-* $(TRL) $(LM_EVAL) build dist *.egg-info .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up ----------------------------------------------------------------------------------------------------------
# A stamp is written once its installation has succeeded; it is out of date when pyproject.toml, the lock or what was
# given on the command line has changed. PYTHON matters only until its virtual environment exists.

$(VENV)/.demo: pyproject.toml $(LOCKED) $(VENV)/.requirements | $(VENV)/bin/pip
	$(call install,$(VENV),.[demo])

$(VENV)/.dev: pyproject.toml $(LOCKED) $(VENV)/.requirements | $(VENV)/bin/pip
	$(call install,$(VENV),.[dev])

# The oldest Transformers wants an older huggingface_hub than the lock's.
$(COMPAT)/.test: pyproject.toml $(LOCKED) $(COMPAT)/.requirements | $(COMPAT)/bin/pip
	$(call install,$(COMPAT),.[test],$(TRANSFORMERS_OLDEST),transformers huggingface-hub)

$(TRL)/.client: pyproject.toml $(LOCKED) $(TRL)/.requirements | $(TRL)/bin/pip
	$(call install,$(TRL),.[trl])

$(LM_EVAL)/.client: pyproject.toml $(LOCKED) $(LM_EVAL)/.requirements | $(LM_EVAL)/bin/pip
	$(call install,$(LM_EVAL),.[lm-eval])

# All but Triton is $(VENV)'s. The interpreter of Triton before 3.7 makes numbers of arrays, as NumPy before 2.4 allows.
$(TRITON)-%/.test: $(VENV)/.dev
	$(VENV)/bin/python -m venv --clear --without-pip $(@D)
	$(VENV)/bin/python -m pip --python $(@D)/bin/python $(wordlist 3,9,$(PIP_INSTALL)) --no-deps \
		$(if $(filter newest,$*),triton,triton==$*) $(if $(filter 3.3.%,$*),'numpy<2.4')
	$(VENV)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_others.pth"
	@touch $@

# What is newest may change from day to day.
$(TRITON)-newest/.test: FORCE

$(NEWEST)/.dev: FORCE | $(NEWEST)/bin/pip
	$(NEWEST)/bin/python $(PIP_INSTALL) --upgrade pip
	$(NEWEST)/bin/python $(PIP_INSTALL) --upgrade --upgrade-strategy eager '$(TORCH)' --editable '.[dev]'
	@touch $@

# $(call install,ENVIRONMENT,PACKAGE,MORE,PACKAGES THAT THE LOCK DOES NOT HOLD)
# PyTorch first, alone, with its Triton: what depends on it then takes the one that is there. Old pips know no editable
# wheels. Without isolation, the build takes the lock's setuptools.
define install
	@echo "installing into $(1), with $(TORCH); the first time takes a few minutes"
	$(1)/bin/python $(PIP_INSTALL) 'pip>=22.3'
	$(call hold,$(1),triton $(4))
	$(1)/bin/python $(PIP_INSTALL) --constraint $(1)/constraints.txt 'setuptools>=77' '$(TORCH)'
	$(call hold,$(1),$(4))
	$(1)/bin/python $(PIP_INSTALL) --constraint $(1)/constraints.txt --no-build-isolation --editable '$(2)' $(3)
	@touch $@
endef

# A PyTorch that was asked for by its version is taken as it is.
hold = @$(if $(LOCKED),$(1)/bin/python .ci/lock.py read $(LOCKED) $(2) $(if $(filter torch,$(TORCH)),,torch),:) \
		> $(1)/constraints.txt

# What was given, in words; rewritten, and so newer than the stamps, only when it differs from the last run's.
%/.requirements: FORCE | %/bin/pip
	@echo '$(TORCH) $(LOCKED) $(TRANSFORMERS_OLDEST)' | cmp -s - $@ || \
		echo '$(TORCH) $(LOCKED) $(TRANSFORMERS_OLDEST)' > $@

$(VENV)/bin/pip $(NEWEST)/bin/pip $(COMPAT)/bin/pip $(TRL)/bin/pip $(LM_EVAL)/bin/pip:
	@command -v '$(PYTHON)' > /dev/null || \
		{ echo "error: no '$(PYTHON)' found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: Python 3.10 or newer is needed, '$(PYTHON)' is $$('$(PYTHON)' -V 2>&1);" \
			"name another: make PYTHON=python3.12" >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2> /dev/null || \
		{ echo "error: '$(PYTHON)' lacks the venv module (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	'$(PYTHON)' -m venv $(@D:/bin=)
