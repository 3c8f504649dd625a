#!/usr/bin/env bash
# dev/gpu_check.sh [--help] - checks the project on a machine with nvcc and one GPU: dev/gpu_check.py.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
