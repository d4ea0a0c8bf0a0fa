#!/usr/bin/env bash
# From a base model to a policy on the cores of this machine: SFT, a reward model, PPO with it, and GRPO with a rule.
#
#     bash docs/examples/base_to_policy.sh [FOLDER]
#
# Eight minutes on two cores. The model (0.6 M parameters, random) and the data are made on the spot; put your own
# model folder and file in their places: MODEL=./qwen2.5-0.5b DATA=./mine.jsonl. Every stage is a plan of its own,
# and starts from the folder `model` of the run before it. SHORT=2 runs two iterations of each stage.
set -euo pipefail
out=${1:-runs/base_to_policy}
mkdir -p "$out"
model=${MODEL:-$out/base} data=${DATA:-$out/data.jsonl}

[ -e "$model" ] || python -c "from executor.tasks import tiny; tiny.build('$model')"
[ -e "$data" ] || python - "$data" <<'PY'
import json, sys
from executor.tasks.prompts import Generated

with open(sys.argv[1], "w") as file:
    for problem in Generated(task="comparison", difficulty=2).batch(0, 6000):
        file.write(json.dumps({"prompt": problem.prompt, "answer": problem.answer}) + "\n")
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

# Pairs for the reward model: the answer over what the SFT model itself writes wrongly to the problems it trains on.
[ -e "$out/pairs.jsonl" ] || python - "$out/sft/model" "$data" "$out/pairs.jsonl" <<'PY'
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from executor.settings import Data
from executor.tasks.files import FileSource

folder, data, pairs = sys.argv[1:]
set_seed(0)
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")
problems = FileSource(Data(path=data)).batch(0, 5400)  # training rows only: the others judge the policies
with open(pairs, "w") as file:
    for start in range(0, len(problems), 300):
        some = problems[start : start + 300]
        asked = tokenizer([p.prompt for p in some], return_tensors="pt", padding=True)
        ids = {key: asked[key] for key in ("input_ids", "attention_mask")}
        drawn = model.generate(**ids, do_sample=True, top_k=0, num_return_sequences=8, max_new_tokens=4)
        texts = tokenizer.batch_decode(drawn[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        for place, problem in enumerate(some):
            wrong = sorted(set(texts[8 * place : 8 * place + 8]) - {problem.answer, ""})
            for text in wrong[:3]:
                row = {"prompt": problem.prompt, "chosen": problem.answer, "rejected": text}
                file.write(json.dumps(row) + "\n")
PY

stage reward_model "$out/sft/model" 400 1e-3 --algorithm reward_model --prompts 64 -- \
  --set data.path="$out/pairs.jsonl" --set optimizer.schedule=linear --set evaluation.problems=300 --set evaluation.every=200
stage ppo "$out/sft/model" 60 5e-4 --algorithm ppo --prompts 256 --mini-batches 4 -- \
  --set reward_model="$out/reward_model/model" --set algorithm.reward_scale=0.2 --set algorithm.kl_coefficient=0.2 \
  --set evaluation.problems=400 --set evaluation.every=20
stage grpo "$out/sft/model" 40 5e-4 --algorithm grpo --prompts 32 --samples 4 --mini-batches 2 --rules seconds_per_sample=10us -- \
  --set evaluation.problems=400 --set evaluation.every=20
