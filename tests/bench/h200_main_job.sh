#!/usr/bin/env bash
# The main job on a GPU machine without network, in one call: extract, train both sides, decode, one table.
#
#   bash tests/bench/h200_main_job.sh setup    wheels of .whl into $SITE, parts of the GGUF file into $WORK
#   bash tests/bench/h200_main_job.sh extract  caches of the training and the held-out conversations
#   bash tests/bench/h200_main_job.sh ce       SpecForge's side and ours, 6 epochs each, decoded: smollm2_ce.json
#   bash tests/bench/h200_main_job.sh tau A,B  recipes A and B (smollm2_variants.py): smollm2_tau.json; extracts the
#                                              cache of twelve layers and makes the initial drafter where they need it
#   bash tests/bench/h200_main_job.sh run      setup, extract and ce
#
# Variables: WORK (scratch, default /tmp/dflash-bench), SITE (packages), OUT (results, default docs/benchmarks),
# GGUF (the target, default joined from .gguf/part-*), DATA, SEEDS (default 0), JOBS (runs at a time on a GPU, default
# 1), COUNT (prompts decoded, 200), MAX_MINUTES (start no recipe later), EXTRA (more options for smollm2_tau.py),
# EXTRACT_SET (more --set for extraction), SPECFORGE_ARGS, CE_ARGS.
# With two GPUs the two sides train on one each; with one they share it unless SERIAL=1, and the result says so.
set -euo pipefail
cd "$(dirname "$0")/../.."
WORK=${WORK:-/tmp/dflash-bench}
SITE=${SITE:-/tmp/site}
OUT=${OUT:-docs/benchmarks}
GGUF=${GGUF:-$WORK/SmolLM2-135M-Instruct.Q4_1.gguf}
DATA=${DATA:-tests/data/smollm2_gsm8k.jsonl.gz}
TOKENIZER=tests/data/smollm2_tokenizer
SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
WIDE_LAYERS='[1,4,8,11,13,14,17,20,23,25,27,29]'
PYTHON=${PYTHON:-python3}
export DFLASH_OFFLINE_HOME=${DFLASH_OFFLINE_HOME:-$WORK/home} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
export PYTHONPATH=$SITE:$PWD PYTHONUNBUFFERED=1 TQDM_DISABLE=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$WORK/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$WORK/triton}
mkdir -p "$WORK" "$SITE" "$OUT"
GPUS=$( (nvidia-smi -L 2>/dev/null || true) | wc -l)
say() { printf '[%s] %s\n' "$(date +%T)" "$*"; }

setup() {
  if compgen -G '.whl/*.whl' >/dev/null && [ ! -d "$SITE/zarr" ]; then
    say "installing $(ls .whl/*.whl | wc -l) wheels"
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl
  fi
  if ! "$PYTHON" -c 'import importlib.metadata as m; m.version("dflash-offline")' 2>/dev/null; then
    # the checkout is used in place; exported folders record its version, which comes from this
    local info=$SITE/dflash_offline-0.1.0.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: dflash-offline\nVersion: 0.1.0\n' >"$info/METADATA"
  fi
  if [ ! -f "$GGUF" ]; then
    cp .gguf/part-* "$WORK"/ 2>/dev/null || true
    if [ -f "$WORK/part-aa" ] && [ -f "$WORK/part-ab" ]; then
      cat "$WORK/part-aa" "$WORK/part-ab" >"$GGUF.joining"
      mv "$GGUF.joining" "$GGUF"
      echo "$SHA256  $GGUF" | sha256sum -c --quiet
      say "joined $GGUF"
    else
      say "parts so far: $(cd "$WORK" && ls part-* 2>/dev/null | tr '\n' ' ')"
    fi
  fi
}

extract_one() { # name, rows, share of held-out conversations, more options
  local name=$1 rows=$2 share=$3
  shift 3
  [ -s "$WORK/extract-$name.json" ] && return
  say "extract $name ($rows)"
  "$PYTHON" -m dflash_offline.cli extract smollm2-135m --json --set "cache=$WORK/$name" --set "target.model=$GGUF" \
    --set "target.tokenizer=$TOKENIZER" --set "data.source=$DATA" --set "data.rows=$rows" \
    --set "data.heldout_share=$share" --set layout.encoding=bf16 "$@" ${EXTRACT_SET:-} >"$WORK/extract-$name.part"
  mv "$WORK/extract-$name.part" "$WORK/extract-$name.json"
  cat "$WORK/extract-$name.json"
}

extract() {
  extract_one heldout "${HELDOUT_ROWS:--200:}" 1.0
  extract_one train "${TRAIN_ROWS:-:-200}" 0.0
}

tau() { # variants
  local gpus=() more=()
  case $1 in *wide* | *late*)
    extract_one heldout-wide "${HELDOUT_ROWS:--200:}" 1.0 --set "target.layer_ids=$WIDE_LAYERS"
    extract_one train-wide "${TRAIN_ROWS:-:-200}" 0.0 --set "target.layer_ids=$WIDE_LAYERS"
    more+=(--wide-cache "$WORK/train-wide" --wide-eval-cache "$WORK/heldout-wide")
    ;;
  esac
  case $1 in *init*)
    [ -d "$WORK/init" ] ||
      "$PYTHON" tests/bench/smollm2_init.py --target "$GGUF" --tokenizer "$TOKENIZER" --out "$WORK/init"
    more+=(--init "$WORK/init")
    ;;
  esac
  [ "$GPUS" -gt 1 ] && [ -z "${CUDA_VISIBLE_DEVICES:-}" ] && gpus=(--gpu "$(seq -s, 0 $((GPUS - 1)))")
  "$PYTHON" tests/bench/smollm2_tau.py --cache "$WORK/train" --eval-cache "$WORK/heldout" --runs "$WORK/runs" \
    --target "$GGUF" --tokenizer "$TOKENIZER" --seeds "${SEEDS:-0}" --jobs "${JOBS:-1}" --variants "$1" "${gpus[@]}" \
    "${more[@]}" ${MAX_MINUTES:+--max-minutes "$MAX_MINUTES"} --out "$OUT/smollm2_tau.json" ${EXTRA:-}
}

specforge() {
  [ -s "$WORK/specforge/training.json" ] && return
  "$PYTHON" tests/bench/specforge_side.py --gguf "$GGUF" --data "$DATA" --out "$WORK/specforge" \
    --seed "${SEEDS%%,*}" ${SPECFORGE_ARGS:-} >"$WORK/specforge.log" 2>&1
}

ce() {
  SEEDS=${SEEDS:-0}
  local shared=() failed=0
  if [ "${SERIAL:-0}" = 1 ]; then
    say "SpecForge's side"
    specforge || { tail -c 3000 "$WORK/specforge.log"; return 1; }
    say "ours"
    tau plain
  else
    [ "$GPUS" -lt 2 ] && shared=(--shared-gpu)
    say "both sides at once"
    (
      [ "$GPUS" -gt 1 ] && export CUDA_VISIBLE_DEVICES=1
      specforge
    ) &
    local side=$!
    ([ "$GPUS" -gt 1 ] && export CUDA_VISIBLE_DEVICES=0; tau plain) || failed=1
    say "ours done"
    wait "$side" || { tail -c 3000 "$WORK/specforge.log"; failed=1; }
    [ "$failed" = 0 ] || return 1
  fi
  say "decode"
  tail -n 1 "$WORK/specforge.log"
  "$PYTHON" tests/bench/smollm2_ce.py --ours "$WORK/runs/plain-seed${SEEDS%%,*}" --specforge "$WORK/specforge" \
    --eval-cache "$WORK/heldout" --target "$GGUF" --tokenizer "$TOKENIZER" --extraction "$WORK/extract-train.json" \
    --scratch "$WORK/judged" --count "${COUNT:-200}" --out "$OUT/smollm2_ce.json" "${shared[@]}" ${CE_ARGS:-}
  cp "$WORK/specforge/training.json" "$OUT/smollm2_specforge_training.json"
}

case ${1:-run} in
  setup) setup ;;
  extract) setup; extract ;;
  ce) ce ;;
  tau) tau "$2" ;;
  run) setup; extract; ce ;;
  *) sed -n '2,18p' "$0"; exit 2 ;;
esac
say "done: $1"
