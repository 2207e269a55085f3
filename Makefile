# Each target only calls documented commands, with the `python` on PATH.
OUT ?= outputs/paper-smoke
RECIPES ?= all
ARGS ?=
LONGBENCH ?= $(wildcard ../shared/data/longbench)
export FFD_LONGBENCH := $(LONGBENCH)

.PHONY: test lint types paper-smoke paper-small paper

test:            ## all fast tests
	python -m pytest -m "not slow"

lint:
	ruff check . && ruff format --check .

types:
	mypy

# From sweeps to every table, figure and the report. The report is written even where a job failed,
# and a failed job still fails the target.
paper-smoke:     ## minutes on two cores
	python run.py experiment=$(RECIPES) size=smoke out=$(OUT) $(ARGS); code=$$?; python -m analysis report --size smoke --out $(OUT) && exit $$code

paper-small:     ## hours on one GPU
	python run.py experiment=all size=small && python -m analysis report --size small

paper:           ## the paper's sizes
	python run.py experiment=all size=paper && python -m analysis report --size paper
