PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: build
build:
	$(BIN)/python setup.py -q build_ext --inplace
