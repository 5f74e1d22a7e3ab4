#!/usr/bin/env bash
# What only a machine with an NVIDIA GPU can show, in some minutes: the tests marked gpu, the three
# scripts in bf16-mixed with NCCL, resumption, two ranks on two GPUs, and training steps per second
# beside the files of ladder/. Ends with a table; the exit status is 1 if a line of it failed.
#
#   [DATA_DIR=data] benchmarks/gpu_check.sh [--write]    --write: into RESULTS.md, too
set -uo pipefail
(($# == 0)) || [[ $* == --write ]] || { echo "usage: gpu_check.sh [--write]" >&2; exit 2; }
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 1

python=${PYTHON:-.venv/bin/python}
# As the scripts count GPUs: nvidia-smi ignores CUDA_VISIBLE_DEVICES, and lists MIG devices, too.
found=$("$python" -c 'from megakit.runtime import find_accelerator
gpu = find_accelerator("gpu")
print(gpu.count, gpu.device)') || { echo "gpu_check: no GPU that works, see above." >&2; exit 2; }
gpus=${found%% *}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
common=(--accelerator gpu --data-dir "${DATA_DIR:-data}")
names=() results=() seconds=()

# NAME COMMAND...
step() {
  local name=$1 begin=$SECONDS result=passed
  shift
  printf '\n== %s\n' "$name" >&2
  "$@" >&2 || result="FAILED ($?)"
  names+=("$name") results+=("$result") seconds+=($((SECONDS - begin)))
}

skip() { names+=("$1") results+=("skipped: $2") seconds+=(0); }

# Stopped after step 100 to the moment, however long the start takes.
# shellcheck disable=SC2317,SC2329  # step calls it by its name
resumed_is_the_same() {
  local place=megakit.training.callbacks:StopOnSignal.on_train_batch_start
  local args=(model_pretrain.py "${common[@]}" --max-steps 200 --save-interval 20)
  "$python" "${args[@]}" --output-dir "$work/whole" || return
  FAULT="$place:101 SIGTERM 0" PYTHONPATH="tests/faults/hook${PYTHONPATH:+:$PYTHONPATH}" \
    "$python" "${args[@]}" --output-dir "$work/stopped"
  (($? == 143)) || return 1
  "$python" "${args[@]}" --output-dir "$work/stopped" || return
  diff "$work/whole/pretrain/metrics.csv" "$work/stopped/pretrain/metrics.csv"
}

step "tests marked gpu" "$python" -m pytest -q -m gpu tests/gpu
for script in pretrain finetune predict; do
  step "$script, bf16-mixed" "$python" "model_$script.py" "${common[@]}" --output-dir "$work/runs"
done
step "resumption, metrics.csv identical" resumed_is_the_same
if ((gpus >= 2)); then
  two=(--devices 2 --output-dir "$work/two")
  step "pretrain, tensor parallel 2, NCCL" \
    "$python" model_pretrain.py "${common[@]}" "${two[@]}" --tensor-parallel 2
  step "finetune, pipeline parallel 2, NCCL" \
    "$python" model_finetune.py "${common[@]}" "${two[@]}" --pipeline-parallel 2
  step "predict, data parallel 2, NCCL" "$python" model_predict.py "${common[@]}" "${two[@]}"
else
  skip "two ranks, NCCL" "one GPU, and NCCL wants one for each rank"
fi

# Its table goes to standard output, too.
exec 3>&1
# shellcheck disable=SC2317,SC2329  # step calls it by its name
steps_per_second() {
  "$python" benchmarks/steps.py --device gpu --data-dir "${DATA_DIR:-data}" --rounds 2 \
    --peers ours 1_torch fused 2_lightning --batches 128 1024 65536 --profile "$@" >&3
}
step "steps per second, and a profile" steps_per_second "$@"

status=0
table() {
  printf '%s, %d GPU(s)\n\n' "${found#* }" "$gpus"
  printf '| what | seconds | |\n|---|---|---|\n'
  for i in "${!names[@]}"; do
    printf '| %-40s | %5d | %s |\n' "${names[i]}" "${seconds[i]}" "${results[i]}"
    [[ ${results[i]} != FAILED* ]] || status=1
  done
}
table >"$work/table"
printf '\n'
cat "$work/table"
if [[ $* == --write ]]; then
  { printf '## The check of a GPU\n\n%s, ' "$(date -I)"; cat "$work/table"; } |
    "$python" benchmarks/report.py gpu-check || status=1
fi
exit "$status"
