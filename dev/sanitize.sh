#!/usr/bin/env bash
# dev/sanitize.sh [--short] - tests with AddressSanitizer and UBSan in every program; `make test-san`.
#
# The sources are copied to build/san, built there with CUDA_CPU_SANITIZE=address,undefined, and tested. All reports
# go to build/san/reports, those of programs that are meant to fail too; one is enough for exit code 1. At a normal end
# nothing may be left allocated, but for what Open MPI leaves (test/lsan.supp).
#   --short   what CI runs: the optimizer, schedules, checkpoints and the trainers, in fewer runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
top=$PWD tree=build/san short=""
case ${1:-} in "") ;; --short) short=1 ;; *) echo "usage: dev/sanitize.sh [--short]" >&2; exit 2 ;; esac

sources=(Makefile README.md train_mlp.cu dev llmc_zero test)
mkdir -p "$tree"
rm -rf "${sources[@]/#/$tree/}" "$tree/reports"
mkdir "$tree/reports"
cp -a "${sources[@]}" "$tree"   # with their dates: make builds what has changed
ln -sfn "$top/.venv" "$tree/.venv"

export DEVICE=cpu CUDA_CPU_SANITIZE=address,undefined
reports="log_path=$top/$tree/reports/report"
export ASAN_OPTIONS="$reports"
export UBSAN_OPTIONS="$reports:print_stacktrace=1:halt_on_error=1"
export LSAN_OPTIONS="suppressions=$top/test/lsan.supp:print_suppressions=0"

cd "$tree"
jobs=${JOBS:-2}
targets=(train_mlp units)
tests=(test/test_{units,train,cli,checkpoint,world,timeline,llmc_runs}.py)
chosen="not every_wait and not twenty_equal"   # the same runs many times over
if [[ $short ]]; then
    targets=(train_mlp build/test/{train_program,test_optimizer,test_stages,test_checkpoint,test_layout,test_schedule,test_reduce})
    tests=(test/test_{units,train,cli,checkpoint}.py)
    chosen="(test_unit and not fast and (optimizer-2 or stages-2 or checkpoint-1 or layout or schedule or reduce))
            or few_weights or bad_input or every_combination"
fi
make -s -j"$jobs" "${targets[@]}"
.venv/bin/python -m pytest -q -n "$jobs" --dist loadfile -k "${chosen//$'\n'/ }" "${tests[@]}" || failed=1

if compgen -G 'reports/*' >/dev/null; then
    head -n 30 reports/*
    echo "sanitize: $(find reports -type f | wc -l) reports in $tree/reports" >&2
    failed=1
fi
exit "${failed:-0}"
