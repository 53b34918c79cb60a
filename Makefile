# Two commands do everything on a bare clone: `make train` and `make test`. The rest is for people who change things.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
VENV ?= .venv
RUN = $(VENV)/bin/python
# One worker per core.
PYTEST = -m pytest -n auto
TORCH = torch==2.13.0
# The newest megatron-core of the package index, beside the installed one.
NEXT = $(VENV)/megatron-next

.PHONY: setup train compare test test-all test-interop test-next test-source test-index fuzz fmt lint docs release bench scale grid faults published published-rehearse soak clean

setup: $(VENV)/.ready

# torch first and by itself: a bare `torch` would bring gigabytes of CUDA packages to a machine without a GPU.
# Transformer Engine's Python lies beside the environment, for tests that read its recipe classes: installed in it,
# without CUDA, it would break `import megatron.core`. NeMo and Megatron Bridge lie beside it too: their mixed precision
# is one file each, and what the rest of them needs would be gigabytes. So does the newest Megatron Core, whose wheel is
# for Python 3.12, and Triton, which it imports; torch must not find that one. Without them tests are skipped.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q $(TORCH)
	$(RUN) -m pip install -q -e '.[dev,docs,interop]'
	$(RUN) -m pip install -q --upgrade --target $(VENV)/te transformer-engine==2.20.2 'pydantic>=2' einops
	-$(RUN) -m pip install -q --upgrade --target $(NEXT) --no-deps --ignore-requires-python --python-version 3.12 \
		--only-binary :all: megatron-core==0.19.2
	-$(RUN) -m pip install -q --upgrade --target $(NEXT) --no-deps triton==3.1.0 && $(RUN) -m tests.releases
	-$(RUN) -m pip install -q --upgrade --target $(VENV)/nemo --no-deps nemo_toolkit==2.6.2
	-$(RUN) -m pip install -q --upgrade --target $(VENV)/peer --no-deps --ignore-requires-python --only-binary :all: \
		megatron-bridge==0.6.2
	touch $@

train: setup
	$(RUN) scripts/train.py $(ARGS)

# Exit code 1: a recipe is outside the gate; 3: of one nothing can be told.
compare: setup
	$(RUN) scripts/compare.py mixed_precision=bf16_mixed,fp8_current,mxfp8,nvfp4 seeds=3 train.train_iters=120 \
		logging.tensorboard=false hydra/launcher=joblib hydra.launcher.n_jobs=2 $(ARGS)

# On both releases of Megatron Core what tells them apart; on the newer alone the rest of what asks it.
test: setup
	$(RUN) $(PYTEST) -m 'not gpu and not slow' --megatron next $(ARGS)
	$(RUN) $(PYTEST) -m 'not gpu and not slow' --megatron rest $(ARGS)

# With the slow tests, and with as many hypothesis examples as each property asks for.
test-all: setup
	$(RUN) $(PYTEST) -m 'not gpu' --hypothesis-profile full --megatron next $(ARGS)
	$(RUN) $(PYTEST) -m 'not gpu' --hypothesis-profile full $(ARGS)

# Axolotl pins other versions of the libraries that the bridges are tested against, so it comes alone. nemo-run brings two
# hundred packages, and needs an old leptonai: it lies beside the environment.
test-interop: setup
	$(RUN) -m pip install -q --upgrade --target $(VENV)/nemo-run nemo_run==0.11.1 leptonai==0.26.6
	$(RUN) -m pip install -q pillow addict art colorama triton
	$(RUN) -m pip install -q --no-deps axolotl==0.19.0
	$(RUN) $(PYTEST) tests/read tests/convert tests/front/test_nemo_run.py $(ARGS)

# The newest releases that pyproject.toml admits, torch too, from the package index: a large download. The newest
# megatron-core needs Python 3.12. With MEGATRON, the source tree of a later release, nothing is downloaded: the tests
# that ask Megatron run on it in the environment of `make setup`.
MEGATRON ?=
NEXT_PYTHON ?= python3.12
test-next: $(if $(MEGATRON),test-source,test-index)

test-source: setup
	$(RUN) -m tests.releases $(MEGATRON)
	$(RUN) $(PYTEST) -m 'not gpu and not slow' --megatron=$(MEGATRON) $(ARGS)

test-index:
	$(NEXT_PYTHON) -m venv .venv-next
	.venv-next/bin/python -m pip install -q --upgrade --upgrade-strategy eager -e '.[dev]'
	.venv-next/bin/python -m pip install -q --target .venv-next/te transformer-engine==2.20.2 'pydantic>=2' einops
	.venv-next/bin/python $(PYTEST) -m 'not gpu' $(ARGS)

# Changed files through every reader, or libFuzzer with ARGS=--guided; the number of cases is printed.
SECONDS ?= 600
fuzz: setup
	$(RUN) -W ignore -m tests.fuzz --seconds $(SECONDS) $(ARGS)

# Packages are formatted to 100 columns; tables of cases in tests read better in wider lines.
WIDE = docs scripts tests setup.py
fmt: setup
	$(RUN) -m ruff format bridge recipes && $(RUN) -m ruff format --line-length 120 $(WIDE)
	$(RUN) -m ruff check --fix bridge recipes && $(RUN) -m ruff check --fix --line-length 120 $(WIDE)

# Of scripts only that each call fits, and that what it names is there.
lint: setup
	$(RUN) -m ruff format --check bridge recipes && $(RUN) -m ruff format --check --line-length 120 $(WIDE)
	$(RUN) -m ruff check bridge recipes && $(RUN) -m ruff check --line-length 120 $(WIDE)
	$(RUN) -m codespell_lib . && $(RUN) -m mypy
	MYPYPATH=scripts $(RUN) -m mypy --config-file /dev/null --ignore-missing-imports scripts/*.py \
		$(addprefix --disable-error-code ,arg-type assignment union-attr dict-item return-value misc)
	$(VENV)/bin/lint-imports

docs: setup
	$(RUN) -m mkdocs build --strict

# Source distribution, wheel and site of the last commit, each looked through and tried; nothing is published.
release: docs
	$(RUN) scripts/release.py $(TORCH)

# Libraries of the comparison lie beside the environment: their pins contradict it. One that cannot be installed or
# imported is named in the page with its reason.
RIVALS = gfloat==0.5.2 more-itertools array-api-compat pychop==0.6.2 qtorch==0.3.0 torchmx==0.1.0
bench: setup
	-for one in $(RIVALS); do $(RUN) -m pip install -q --no-deps --upgrade --target $(VENV)/rivals $$one; done
	$(RUN) -W ignore scripts/benchmark.py --write docs/explain/speed.md $(ARGS)

scale: setup
	$(RUN) scripts/scale.py --write docs/explain/parallel.md $(ARGS)

# Each fault in a run of its own, some in two processes: a few minutes.
faults: setup
	$(RUN) -W ignore -m tests.training.fault_table --write docs/explain/faults.md $(ARGS)

grid: setup
	$(RUN) -W ignore scripts/audit_grid.py --write docs/howto/is-it-really-fp8.md $(ARGS)

# One process; PUBLISHED is a folder or an archive of recipes that Megatron Bridge saved.
published: setup
	$(RUN) scripts/published.py $(PUBLISHED) --write docs/explain/published.md $(ARGS)

# Trains for a few steps per class of recipes; the answers in RESULTS are not made again.
RESULTS ?= outputs/published.json
published-rehearse: setup
	$(RUN) scripts/published.py $(PUBLISHED) --rehearse --results $(RESULTS) --write docs/howto/rehearse.md $(ARGS)

soak: setup
	$(RUN) scripts/soak.py $(ARGS)

clean:
	rm -rf build dist site outputs multirun .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
