#!/usr/bin/env bash
# The whole main job on a small real model, as the commands that you would type. Every command continues where it was
# interrupted, so this script may be stopped and started again. SIZE=full trains longer.
set -euo pipefail

OUT=${OUT:-output}
SIZE=${SIZE:-default}
case $SIZE in
  default) PROMPTS=1100 EPOCHS=3 BENCH=20 ;;
  full)    PROMPTS=4500 EPOCHS=4 BENCH=40 ;;
  *) echo "SIZE: $SIZE is not known; use default or full." >&2; exit 2 ;;
esac
export HF_HUB_OFFLINE=1
mkdir -p "$OUT"

stage() { # stage NAME COMMAND...: run it, and note the seconds it took
  local name=$1 started=$SECONDS
  shift
  echo "== $name: $*" >&2
  "$@"
  printf '%s\t%d\n' "$name" $((SECONDS - started)) >> "$OUT/stages.tsv"
}

stage verifier   speculators fetch verifier --output "$OUT/verifier"
stage prompts    speculators fetch prompts --num-prompts $PROMPTS --output "$OUT/prompts.jsonl"
stage regenerate speculators regenerate --verifier "$OUT/verifier" --prompts "$OUT/prompts.jsonl" --output "$OUT/answers.jsonl" \
                   --max-tokens 256 --concurrency 32
stage prepare    speculators prepare --verifier "$OUT/verifier" --data "$OUT/answers.jsonl" --output "$OUT/data"
stage extract    speculators extract --verifier "$OUT/verifier" --data "$OUT/data" --output "$OUT/hidden_states"
for type in eagle3 dflash; do
  extra=(); [ $type = dflash ] && extra=(--block-size 8 --max-anchors 256)
  stage "train $type" speculators train --verifier "$OUT/verifier" --data "$OUT/data" --hidden-states "$OUT/hidden_states" \
                   --speculator-type $type "${extra[@]}" --epochs $EPOCHS --output "$OUT/$type"
done
stage bench      speculators bench --verifier "$OUT/verifier" --runs-dir "$OUT" --compare eagle3,dflash,fp8,dflash+fp8 \
                   --tasks reasoning,code --num-prompts $BENCH --output "$OUT/bench"

echo
echo "Seconds by stage (all runs of this script):"
column -t -s $'\t' "$OUT/stages.tsv" 2>/dev/null || cat "$OUT/stages.tsv"
