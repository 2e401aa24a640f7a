#!/usr/bin/env bash
# The whole main job on a small real model, as the commands that you would type. Every command continues where it was
# interrupted, so this script may be stopped and started again. SIZE=full trains longer.
set -euo pipefail

OUT=${OUT:-output}
SIZE=${SIZE:-default}
case $SIZE in
  default) PROMPTS=1200 EPOCHS=2 BENCH=6 ;;
  full)    PROMPTS=6000 EPOCHS=2 BENCH=15 ;;
  *) echo "Error: SIZE: $SIZE is not known; use default or full." >&2; exit 2 ;;
esac
export HF_HUB_OFFLINE=1
mkdir -p "$OUT"

# Nothing that was started here outlives this script.
trap 'jobs -p | xargs -r kill 2>/dev/null || true; wait' EXIT

stage() { # stage NAME COMMAND...: run it, and note the seconds it took
  local name=$1 started=$SECONDS
  shift
  echo "== $name: $*" >&2
  "$@"
  printf '%-12s %5d s\n' "$name" $((SECONDS - started)) >> "$OUT/stages.txt"
}

# Two trainings side by side, one core each: on a small machine that is faster than one after the other on two cores,
# whose threads would wait for each other after every small operation.
train_both() {
  local common=(--verifier "$OUT/verifier" --data "$OUT/data" --hidden-states "$OUT/hidden_states" --epochs $EPOCHS)
  OMP_NUM_THREADS=1 speculators train --speculator-type eagle3 "${common[@]}" --output "$OUT/eagle3" \
    > "$OUT/eagle3.log" 2>&1 &
  local eagle3=$!
  OMP_NUM_THREADS=1 speculators train --speculator-type dflash --block-size 8 --max-anchors 128 "${common[@]}" \
    --output "$OUT/dflash"
  wait $eagle3 || { cat "$OUT/eagle3.log" >&2; return 1; }
  grep -A 3 "$OUT/eagle3:" "$OUT/eagle3.log"
}

# What the drafts should get from the server, walked over the very answers that the baseline gave in the bench.
predict() {
  local draft
  for draft in eagle3 dflash; do
    speculators replay "$OUT/$draft" --answers "$OUT/bench/answers.jsonl" --output "$OUT/bench/predicted/$draft.json"
  done
}

stage verifier   speculators fetch verifier --output "$OUT/verifier"
stage prompts    speculators fetch prompts --num-prompts $PROMPTS --output "$OUT/prompts.jsonl"
stage regenerate speculators regenerate --verifier "$OUT/verifier" --prompts "$OUT/prompts.jsonl" \
                   --output "$OUT/answers.jsonl" --concurrency 64 --enforce-eager
stage prepare    speculators prepare --verifier "$OUT/verifier" --data "$OUT/answers.jsonl" --output "$OUT/data"
stage extract    speculators extract --verifier "$OUT/verifier" --data "$OUT/data" --output "$OUT/hidden_states"
stage train      train_both
stage bench      speculators bench --verifier "$OUT/verifier" --runs-dir "$OUT" --compare eagle3,dflash,fp8,dflash+fp8 \
                   --tasks reasoning,code --num-prompts $BENCH --max-tokens 128 --output "$OUT/bench" > /dev/null
stage predict    predict
speculators report "$OUT/bench"

echo
echo "Seconds by stage (every start of this script):"
cat "$OUT/stages.txt"
