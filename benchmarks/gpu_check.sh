#!/usr/bin/env bash
# Runs gpu_check.py, which says what it takes; PYTHON names another Python than .venv's.
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..
exec "${PYTHON:-$root/.venv/bin/python}" "$root/benchmarks/gpu_check.py" "$@"
