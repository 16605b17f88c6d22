# Everything below sets itself up: a fresh machine needs Python 3.10 or newer and make.
PYTHON ?= python3
RUN := .venv/bin/python
STAMP := .venv/.made
TRITONS := 3.6.0 3.8.0 3.9.0 # besides the one that `make setup` installs
WITH_TRITON := tests/crosscompile tests/launch

.PHONY: setup docs demo test test-latest parallel-test fault-test fuzz compile-all lint gpu-test race card card-summary card-packages clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install -q --upgrade pip
	$(RUN) -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# A real video decoder with random weights, stock and accelerated in turns; --weights DIR takes a downloaded one.
demo: setup
	.venv/bin/turnout race wan-vae --dtype bfloat16 --rounds 3 --seconds 10 --report demo/wan-vae-bfloat16.html
	.venv/bin/turnout race wan-vae --dtype float32 --rounds 3 --seconds 10 --report demo/wan-vae-float32.html
	@echo "Reports: demo/wan-vae-bfloat16.html, demo/wan-vae-float32.html"

# Threads that wait without spinning: two test processes share the cores.
# Then the kernels and the way they are launched with each other Triton that is supported.
test: setup lint $(TRITONS:%=.tritons/%/.made)
	OMP_WAIT_POLICY=passive $(RUN) -m pytest -q -n 2 --dist worksteal
	@for version in $(TRITONS); do echo "Triton $$version"; \
	TURNOUT_COMPILE=quick PYTHONPATH=.tritons/$$version $(RUN) -m pytest -q -n 2 --dist worksteal $(WITH_TRITON) || exit 1; done

# Every launch of every case, for every card, with every Triton that is supported. Takes long.
compile-all: setup $(TRITONS:%=.tritons/%/.made)
	TURNOUT_COMPILE=all $(RUN) -m pytest -q -n 2 --dist worksteal $(WITH_TRITON)
	@for version in $(TRITONS); do echo "Triton $$version"; \
	TURNOUT_COMPILE=all PYTHONPATH=.tritons/$$version $(RUN) -m pytest -q -n 2 --dist worksteal $(WITH_TRITON) || exit 1; done

# A Triton alone, without the torch it came with: enough to compile with.
.tritons/%/.made: | setup
	$(RUN) -m pip install -q --no-deps --target .tritons/$* triton==$*
	touch $@

# The CPU tests with the newest torch and Triton that are supported, in an environment of its own.
LATEST := .latest/bin/python
LATEST_STAMP := .latest/.made

$(LATEST_STAMP): pyproject.toml
	$(PYTHON) -m venv .latest
	$(LATEST) -m pip install -q --upgrade pip
	$(LATEST) -m pip install -q -e '.[dev]' 'torch==2.15.*' 'triton==3.9.*'
	touch $(LATEST_STAMP)

test-latest: $(LATEST_STAMP)
	OMP_WAIT_POLICY=passive $(LATEST) -m pytest -q -n 2 --dist worksteal

# Several ranks in their long form: every model, size, axis, dtype and number of ranks.
parallel-test: setup
	OMP_WAIT_POLICY=passive TURNOUT_PARALLEL=all $(RUN) -m pytest -q -n 2 --dist worksteal --timeout 3600 tests/parallel

# The tests of faults in their long form, a line of counts for each: 500 signals of each kind to every CPU route,
# 10,000 patterns of overlap to every op and CPU route that writes, 100,000 calls with ever new shapes, every public
# call in every situation with every route pinned, 10,000 mutated rows of tables, 50 kills in the middle of a write.
SIGNALS ?= 500
PATTERNS ?= 10000
CALLS ?= 100000
fault-test: setup
	OMP_WAIT_POLICY=passive TURNOUT_SIGNALS=$(SIGNALS) TURNOUT_PATTERNS=$(PATTERNS) TURNOUT_CALLS=$(CALLS) \
	TURNOUT_EVERY_CALL=1 TURNOUT_MUTATED=10000 TURNOUT_KILLS=50 $(RUN) -m pytest -q -s tests/faults

# Random calls down every route that takes them, against float64; goes on where the last run stopped. Counts go to
# the results of MACHINE, such as cpu-zen4. Status 1 if a route is wrong.
MACHINE ?=
fuzz: setup
	$(RUN) -m tests.fuzz --calls $(CALLS) $(if $(MACHINE),--out benchmarks/results/$(MACHINE))

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	$(RUN) -m benchmarks.docs_pages --check
	.venv/bin/lint-imports

# The pages that follow from data, then the site: build/site/index.html. Needs no network; a warning is an error.
docs: setup
	$(RUN) -m benchmarks.docs_pages
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# What a card's own Python may lack, for that Python: what pip would bring torch with, and what it need not.
PACKAGES_FOLDER := .card-packages
CARD_PYTHON ?= 3.12
CARD_PLATFORM ?= manylinux2014_x86_64
ALONE := diffusers peft
WITH_NEEDS := typer click rich platformdirs pytest pytest-timeout pytest-xdist

# On a machine with a CUDA GPU, with whatever torch and triton it has, and pytest-xdist: processes share the card.
PROCESSES ?= 15
gpu-test:
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -m gpu -n $(PROCESSES) --dist worksteal tests

# Every known model on this machine's GPU, in the order of `turnout race --list`, a row of each in RESULTS as soon as
# it is done. To go on after a run that was cut off, run it again: models with a row of this code are left out.
MODELS ?= all
BUDGET ?= 540
RESULTS ?= benchmarks/results
race:
	PYTHONPATH=src $(PYTHON) -m turnout race $(MODELS) --budget $(BUDGET) --rounds 4 --seconds 4 --missing --out $(RESULTS)

# Everything that is measured on a card, in steps of at most STEP seconds, what decides most first, until BUDGET is
# spent. Run it again to go on: what this code has a row of is left out. At the end: which targets are reached.
STEP ?= 540
CARD := PYTHONPATH=src:.:$(PACKAGES_FOLDER) $(PYTHON) -m benchmarks.card --out $(RESULTS)
card:
	$(CARD) --step $(STEP) --budget $(BUDGET) --processes $(PROCESSES) $(if $(AGAIN),--again)

card-summary:
	$(CARD) --summary $(if $(CODE),--commit $(CODE)) $(if $(NAME),--card $(NAME))

# What the steps import beside torch and Triton, for a card without a network: copy the folder.
PIP_FOR_CARD = $(PYTHON) -m pip install -q --no-compile -c constraints.txt --target $(PACKAGES_FOLDER) \
	--python-version $(CARD_PYTHON) --platform $(CARD_PLATFORM) --only-binary=:all:
card-packages:
	rm -rf $(PACKAGES_FOLDER)
	$(PIP_FOR_CARD) --no-deps $(ALONE)
	$(PIP_FOR_CARD) $(WITH_NEEDS)
	rm -rf $(PACKAGES_FOLDER)/bin $(PACKAGES_FOLDER)/*/tests

clean:
	rm -rf .venv .tritons .latest .card-packages dist build demo
