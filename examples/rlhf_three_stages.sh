#!/usr/bin/env bash
# The three classic stages on one small model and task: SFT, a reward model from pairs, PPO against it.
#
#     bash examples/rlhf_three_stages.sh [key=value ...for every stage]
#
# Needs models/smollm2 (make demo, or examples/prepare_smollm2.py).
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
rm -rf runs/rlhf
python examples/addition_data.py runs/rlhf/data
verl train examples/rlhf/sft.yaml "$@"
verl export runs/rlhf/sft runs/rlhf/sft/model
verl train examples/rlhf/reward.yaml "$@"
verl export runs/rlhf/reward runs/rlhf/reward/model
verl train examples/rlhf/ppo.yaml "$@"
