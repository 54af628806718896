# make demo: split, plan and train a real model on this machine.  make test: everything CI checks.
# make gpu: all that needs a GPU, tests and measurements, on the one there is; benchmarks/gpu keeps what it found.
# make site: the documentation, in build/site.
# All set themselves up in .venv with whichever Python 3.11+ is named by PYTHON.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test gpu site clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m autopipe.demo

# The simulated accelerator is built while types are checked; its tests tell of a build that failed.
test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	{ ! command -v g++ || PYTHONPATH=tests $(BIN)/python -c "import simulated"; } >/dev/null 2>&1 & $(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --reruns 1 --rerun-show-tracebacks -r aR --durations 25

gpu: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu

site: $(READY)
	$(BIN)/python -m sphinx -q -W notebooks build/site

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[tests]"
	touch $@

clean:
	rm -rf $(VENV)
