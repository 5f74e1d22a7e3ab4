#!/usr/bin/env bash
# Trains step 3 of the ladder with the tutorial's Megatron-Core and with a later version, which has
# an environment of its own, and prints the losses of both. Takes the options of 3_megatron.py.
# `newest.sh --setup` only sets up this environment.
set -euo pipefail

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
venv=$(realpath -m "${VENV:-$root/.venv}") later=$root/build/venv-newest
arguments=(--dataset mnist "$@") # the digits of scikit-learn are not in the later environment
if [[ " $* " == *" -h "* || " $* " == *" --help "* ]]; then
  exec "$root/run" ladder 3 --help
fi
if [[ "$*" == *digits* ]]; then
  echo "newest.sh: --dataset digits: the later environment lacks scikit-learn. Use MNIST." >&2
  exit 2
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore # on one CPU

set_up() ( # in a shell of its own, because prepare_environment changes to another folder
  # shellcheck source=run_setup.sh
  source "$root/run_setup.sh"
  prepare_environment
  mkdir -p "$root/build"
  exec 9>"$later.lock"
  flock 9
  if [[ ! -x $later/bin/python ]]; then
    echo "Setting up $later: 5.4 GB, of which uv downloads what its cache lacks." >&2
    uv venv --quiet --python ">=3.12,<3.14" "$later"
  fi
  uv pip sync --quiet --require-hashes --python "$later" "$root"/template/megatron/*.lock
  cp -r "$venv/.uv" "$later" # projects that borrow its packages take this, too
)

version() { # ENVIRONMENT
  "$1/bin/python" -c 'from importlib.metadata import version; print(version("megatron-core"))'
}

train() { # COLUMN ENVIRONMENT PROCESSES OPTION...
  local launch=()
  (($3 == 1)) || launch=(-m torch.distributed.run --standalone --nproc-per-node "$3")
  "$2/bin/python" "${launch[@]}" "$root/ladder/3_megatron.py" "${arguments[@]}" "${@:4}" \
    >"$out/$1" 2>"$out/log" || { local status=$? && cat "$out/log" >&2 && exit "$status"; }
}

"$root/run" setup
if [[ "$*" == --setup ]]; then set_up; exit; fi
train 1 "$venv" 1 --save "$out/checkpoint" # first, because it refuses wrong options
set_up
train 2 "$later" 1
train 3 "$later" 2 --tensor-parallel 2
train 4 "$later" 2 --pipeline-parallel 2
train 5 "$later" 2
train 6 "$later" 1 --load "$out/checkpoint"

old=$(version "$venv") new=$(version "$later")
printf '%s  %-11s  %-11s  %-11s  %-11s  %-11s  %s\n' step "$old" "$new" TP2 PP2 DP2 "after $old"
awk '
  FNR == NR { first[$1] = $2 }
  { row[$1] = row[$1] "  " $2; d = $2 - first[$1]; if (d * d > most * most) most = d }
  END {
    for (step = 1; step in row; step++) printf "%4d%s\n", step, row[step]
    printf "largest difference from %s: %.1e\n", old, most < 0 ? -most : most
  }' old="$old" "$out"/[1-6]
