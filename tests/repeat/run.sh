#!/bin/bash
# tests/repeat/run.sh TREE PACKAGE RUNS RECIPE [--set A.B=C ...]
#
# Runs quickstart, ppo, dapo or gspo of a checkout (TREE, with its .venv; PACKAGE is its import package) for 50
# seeded steps on one replica and writes RUNS/RECIPE: dumps of every step, and in recorded/ what sitecustomize.py
# records. Two such runs are equal bit for bit, whatever else the machine does; python -m tests.compare_runs says
# whether they are. quickstart comes first: it makes the data of the others in RUNS.
#
# Settings beyond those of the recipes, and why:
#   rollout.local.slots = 512        a warm-up probe has 256 samples; with fewer slots the router cuts it by the
#                                    replica's measured speed
#   no validation                    it shares the engine with the first batch, and time decides which steps
#   REFILLS_TOGETHER=1               DAPO replaces a filtered group when its grade arrives, so time would decide which
#                                    prompts are prefilled together; products of 1 to 3 rows have other last bits
#   no timed or last checkpoints     for speed
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$1" && pwd) package=$2 recipe=$4
mkdir -p "$3"; cd "$3"; runs=$PWD; shift 4
export PYTHONPATH=$here:$tree OMP_NUM_THREADS=1 REFILLS_TOGETHER=1
settings=(--set run.dir="\"$runs\"" --set run.name="$recipe" --set run.seed=0 --set run.steps=50
  --set coordinator.max_staleness=0 --set coordinator.dump=true --set rollout.replicas=1
  --set rollout.local.slots=512 --set validation.at_start=false --set validation.at_end=false
  --set checkpoint.at_end=false --set checkpoint.every_minutes=0 "$@")
atoll=("$tree/.venv/bin/python" -c "import sys; from $package.cli.main import main; sys.exit(main())")
if [[ $recipe == quickstart ]]; then
  "${atoll[@]}" quickstart "${settings[@]}"
else
  "${atoll[@]}" run "$tree/examples/$recipe.toml" "${settings[@]}"
fi
