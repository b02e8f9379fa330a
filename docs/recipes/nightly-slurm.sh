#!/bin/sh
# nightly-slurm.sh SWEEP.yaml BASELINE [OPTION of gate]...: run in an allocation, then a gate; its exit code.
# RESULTS, OUT: folders that all nodes see. REPEAT: runs of every cell. NODES and SBATCH_* variables: of the job.
set -u
sweep=$1 baseline=$2
shift 2
results=${RESULTS:-results} out=${OUT:-nightly} repeat=${REPEAT:-8}
id=$(basename "$sweep" .yaml)
mkdir -p "$out"
sbatch --wait --nodes="${NODES:-1}" --wrap \
  "exec mfsdp-bench run $sweep --launcher slurm --repeat $repeat --retry-failed --results $results" || code=$?
echo "run: ${code:-0}" >&2
# 3: runs failed, which the gate says cell by cell. Anything else: nothing new is there to be judged.
case ${code:-0} in 0|3) ;; *) exit "$code" ;; esac
mfsdp-bench report "$id" --results "$results" --out "$out"
mfsdp-bench gate "$id" --baseline "$baseline" --results "$results" --junit "$out/gate.xml" --markdown "$out/gate.md" "$@"
