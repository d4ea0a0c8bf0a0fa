#!/usr/bin/env bash
# From a base model to a policy on the cores of this machine: SFT, a reward model, PPO with it, and GRPO with a rule.
#
#     bash docs/examples/base_to_policy.sh [FOLDER]
#
# Twelve minutes on two cores. The model (0.6 M parameters, random) and the data are made on the spot; put your own
# model folder and file in their places: MODEL=./qwen2.5-0.5b DATA=./mine.jsonl. Every stage is a plan of its own,
# and starts from the folder `model` of the run before it. SHORT=2 runs two iterations of each stage.
set -euo pipefail
out=${1:-runs/base_to_policy}
mkdir -p "$out"
model=${MODEL:-$out/base} data=${DATA:-$out/data.jsonl}

[ -e "$model" ] || python -c "from executor.tasks import tiny; tiny.build('$model')"
[ -e "$data" ] || python - "$data" <<'PY'
import json, random, sys
from executor.tasks.prompts import Generated

drawn = random.Random(0)  # rejected answers as the policy could write them: the other number, any of its length
task = Generated(task="comparison", difficulty=2, preference="pairs")
with open(sys.argv[1], "w") as file:
    for problem in task.batch(0, 6000):
        wrong = [problem.meta["rejected"], str(drawn.randrange(10, 100))]
        row = {"prompt": problem.prompt, "answer": problem.answer, "chosen": problem.answer, "rejected": drawn.choice(wrong)}
        if row["rejected"] != row["chosen"]:
            file.write(json.dumps(row) + "\n")
PY

# stage NAME START ITERATIONS RATE [options of design] -- [options of launch]
stage() {
  local name=$1 start=$2 iterations=$3 rate=$4 options=()
  shift 4
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  rlhfsim design --gpu cpu-core --gpus 2 --model "$model/config.json" --prompt-len 16 --response-len 4 \
    --no-packing "${options[@]}" --out "$out/$name.json" > "$out/$name.txt"
  rlhfsim launch "$out/$name.json" --model "$start" --out "$out/$name" --iterations "${SHORT:-$iterations}" \
    --set data.task=file --set data.path="$data" --set optimizer.learning_rate="$rate" "$@"
}

stage sft "$model" 200 2e-3 --algorithm sft --prompts 32 --
stage reward_model "$out/sft/model" 200 1e-3 --algorithm reward_model --prompts 32 --
stage ppo "$out/sft/model" 40 2e-4 --algorithm ppo --prompts 128 --mini-batches 4 -- \
  --set reward_model="$out/reward_model/model" --set algorithm.kl_coefficient=1.0 \
  --set evaluation.problems=200 --set evaluation.every=10
stage grpo "$out/sft/model" 40 5e-4 --algorithm grpo --prompts 32 --samples 4 --mini-batches 2 --rules seconds_per_sample=10us -- \
  --set evaluation.problems=200 --set evaluation.every=10
