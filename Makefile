# make demo: split, plan and train a real model on this machine.  make test: everything CI checks.
# make gpu: all that needs a GPU, tests and measurements, on the one there is; benchmarks/gpu keeps what it found.
# make site: the documentation, in build/site.
# All set themselves up in .venv with whichever Python 3.11+ is named by PYTHON.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Bytecode is made of what is imported, and kept: pip would compile all that it installs, a minute on one core, and
# each process all that it imports.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test gpu site clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m autopipe.demo

# Types are checked, and the simulated accelerator is built, beside the tests: each keeps one core busy, and would
# leave the others idle. So do tests of ranks, which wait for one another and for limits: three workers fill two
# cores. The accelerator's tests tell of a build that failed.
test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy >$(VENV)/mypy.log 2>&1 & types=$$!; \
	{ ! command -v g++ || PYTHONPATH=tests $(BIN)/python -c "import simulated"; } >/dev/null 2>&1 & \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile \
		--reruns 1 --rerun-show-tracebacks -r aR --durations 25; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/mypy.log; exit $$((tests | types))

gpu: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu

site: $(READY)
	$(BIN)/python -m sphinx -q -W notebooks build/site

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[tests]"
	touch $@

clean:
	rm -rf $(VENV)
