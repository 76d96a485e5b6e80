# Every target works in .venv, which is made once, kept, and remade when it is broken.

PYTHON ?= python3
# Tried when python3 is not a tested version, but never when you named a Python yourself.
OTHERS := $(if $(filter file,$(origin PYTHON)),python3.13 python3.12 python3.11)

# Written when an install has ended well. It holds the folder, since an environment cannot be moved.
STAMP := .venv/.made
# "yes" if the stamp is right and the environment's Python still starts and finds its packages.
WHOLE := $(shell [ "$$(cat $(STAMP) 2>/dev/null)" = "$$(pwd -P)" ] && .venv/bin/python -I -c \
	'from importlib.util import find_spec; exit(not all(map(find_spec, ["pip", "torch", "minivllm"])))' \
	2>/dev/null && echo yes)
# Written when the tools that build the book have been added, which is when it is first built.
BOOK := .venv/.book
# One worker a core, four at most: each has PyTorch in memory.
PARALLEL := -n logical --maxprocesses 4 --dist loadgroup
# Notebooks run cell by cell, each in one worker and with one thread, since threads of two kernels hold each
# other up; the output of marked cells is compared with what is stored.
NOTEBOOKS := OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist loadfile \
	--nbval-lax --nbval-current-env --nbval-cell-timeout=300 notebooks solutions
CODE := minivllm tests book/conf.py book/ext $(wildcard solutions/*.py notebooks/*.py)

.PHONY: help demo test test-full test-book gate check format exercises notebooks sync lab book env clean remove
.SUFFIXES:

help: ## Show this list (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "Choose a Python with make PYTHON=/path/to/python3.12 (it counts when .venv is made)."

demo: $(STAMP) ## Fetch the small model, then run one workload up the ladder
	.venv/bin/minivllm pull
	.venv/bin/minivllm ladder

test: $(STAMP) ## Run the tests
	.venv/bin/python -m pytest $(PARALLEL)
	$(NOTEBOOKS)

test-full: $(STAMP) ## Run the tests with the long sets
	.venv/bin/python -m pytest $(PARALLEL) -m ""
	$(NOTEBOOKS)

gate: $(STAMP) ## Prove that the checks of the exercises are strict: run every mutant of every answer
	.venv/bin/python -m minivllm.course.gate

test-book: book ## Look at every page of the book in Chromium (another: make test-book CHROMIUM=PATH)
	.venv/bin/python -m pytest tests/book_site \
		tests/test_project.py::test_all_that_the_project_needs_here_is_pinned

check: $(STAMP) ## Check format, lint and types
	.venv/bin/ruff format --check $(CODE)
	.venv/bin/ruff check $(CODE)
	.venv/bin/mypy minivllm tests

format: $(STAMP) ## Format the code and repair what the linter can
	.venv/bin/ruff check --fix-only $(CODE)
	.venv/bin/ruff format $(CODE)

exercises: $(STAMP) ## Build the notebooks of exercises and solutions from solutions/*.py
	.venv/bin/python -m minivllm.course.build

notebooks: $(STAMP) ## Run and store the lab notebooks, on a quiet machine (one: ARGS=ch03_paging)
	.venv/bin/python -m minivllm.course.run $(ARGS)

sync: $(STAMP) ## Fill the code and outputs that the chapters quote
	.venv/bin/python -m minivllm.course.sync

lab: $(STAMP) ## Open the notebooks in JupyterLab (options: make lab ARGS=--no-browser)
	.venv/bin/jupyter-lab --LabApp.default_url=/lab/tree/notebooks $(ARGS)

# Always from nothing: a page that has not changed may link to a heading that has gone.
book: $(BOOK) ## Build the book as pages to read in a browser
	@rm -rf book/_build
	.venv/bin/python -m sphinx -W --keep-going -n -q -b html -d book/_build/doctrees -c book . book/_build/html
	@echo "The book is built. Open this file in a browser: $(CURDIR)/book/_build/html/index.html"

env: $(STAMP) ## Make or update .venv, the environment of every other target
	@echo ".venv is ready."

clean: ## Remove .venv, caches and built files; keep the model and your own work in my/
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage build dist book/_build
	find . -path ./my -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \
		-o -name '*.egg-info' \) -prune -exec rm -rf {} +

remove:
	@if [ -e .venv ] || [ -L .venv ]; then echo "Removing .venv: it is unfinished, broken or moved."; fi
	@rm -rf .venv

# Sets $py to a Python of a tested version, else to a newer one, and $version to what it is.
define find_python
	py=; newer=; found=; \
	for p in "$(PYTHON)" $(OTHERS); do \
		v=$$("$$p" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue; \
		found="$$found $$p ($$v)"; \
		case $$v in \
			3.1[123].*) py=$$p; version=$$v; break ;; \
			3.1[4-9].* | 3.[2-9][0-9].*) [ -n "$$newer" ] || { newer=$$p; version=$$v; } ;; \
		esac; \
	done; \
	py=$${py:-$$newer}; \
	if [ -z "$$py" ]; then \
		echo "minivllm needs Python 3.11 or newer (3.11 to 3.13 are tested)."; \
		echo "Found:$${found:- none that starts; looked for $(PYTHON) $(OTHERS)}"; \
		echo "Install one, or name one: make PYTHON=/path/to/python3.12"; \
		exit 1; \
	fi >&2; \
	if ! "$$py" -c 'import ensurepip, venv; ensurepip.version()' 2>/dev/null; then \
		echo "$$py ($$version) cannot make environments: its module venv or ensurepip is missing."; \
		echo "On Debian or Ubuntu: apt install python$${version%.*}-venv. Then run make again."; \
		echo "Or name another Python: make PYTHON=/path/to/python3.12"; \
		exit 1; \
	fi >&2
endef

# Reads what pip prints. Shows a dot for each package, and name, size and progress of each large file.
define show_progress
	( tenth=0; \
	while read -r a b c d rest; do \
		case "$$a $$d" in \
			"Collecting "* | "Processing "*) printf . ;; \
			"Downloading MB)" | "Downloading GB)") tenth=0; printf '\n%s %s %s' "$${b%%-*}" "$$c" "$$d" ;; \
			"Progress "*????????) \
				[ $$((10 * b / d)) -le $$tenth ] || { tenth=$$((10 * b / d)); printf ' %s0%%' $$tenth; } ;; \
			"Installing "*) rm -f $(STAMP).old; printf '\nUnpacking ...\n' ;; \
			"exit "*) exit $$b ;; \
		esac; \
	done; exit 1 )
endef

PIP := .venv/bin/python -u -m pip install --constraint constraints.txt
EXTRAS := lab,test,dev
BOOK_EXTRAS := book

define say_why
	echo; \
	echo "pip could not install the packages; its reason stands above."; \
	echo "Often it is the network, a proxy or a full disk (2.5 GB are needed, and more with CUDA)."; \
	echo "Put it right and run make again."; \
	exit 1
endef

# The build tools come from the same exact set, so an update with nothing to fetch needs no network.
# If an update fails before it changed anything, the old stamp returns: the next make tries again.
$(STAMP): pyproject.toml constraints.txt $(if $(WHOLE),,remove)
	@[ ! -e $@ ] || mv $@ $@.old
	@[ -e .venv ] || { $(find_python); echo "Making .venv with $$py ($$version)."; "$$py" -m venv .venv; }
	@echo "Bringing .venv to the exact set of constraints.txt. The first time, this takes minutes."
	@$(PIP) --quiet pip hatchling editables && \
	{ $(PIP) --progress-bar raw --no-build-isolation --editable ".[$(EXTRAS)]"; echo "exit $$?"; } | \
	$(show_progress) || { \
		[ ! -e $@.old ] || mv $@.old $@; \
		$(say_why); \
	} >&2
	@pwd -P > $@ && rm -f $@.old

# The stamp is older than the environment's after each change of that, so the tools follow the constraints.
$(BOOK): $(STAMP)
	@echo "Bringing the tools that build the book to the exact set of constraints.txt."
	@{ $(PIP) --progress-bar raw --no-build-isolation --editable ".[$(BOOK_EXTRAS)]"; echo "exit $$?"; } | \
	$(show_progress) || { $(say_why); } >&2
	@touch $@
