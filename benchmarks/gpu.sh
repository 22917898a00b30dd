#!/usr/bin/env bash
# What is to be learnt of pdserve on a GPU, most worth first: see docs/gpu.md.
#   benchmarks/gpu.sh OUT [PART...]      parts: check, first, compare, large, goodput, chaos (default: all, in this order)
# Logs and figures go to OUT. PYTHON is the interpreter that has vLLM (.venv/bin/python), SIZE that of the larger model
# (1.5B), LIMIT the seconds that a part may take (560). Exit code 1 where a part failed, 3 where there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || { sed -n '2,5s/^# //p' "$0"; exit 2; }
OUT=$(realpath -m "$1") && mkdir -p "$OUT" && shift
PARTS=("$@") && [ $# -gt 0 ] || PARTS=(check first compare large goodput chaos)
PYTHON=${PYTHON:-.venv/bin/python} SIZE=${SIZE:-1.5B} LIMIT=${LIMIT:-560}
MODEL=${MODEL:-/tmp/pdserve-gpu-$SIZE}
export PYTHONPATH=$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH} PDSERVE_STATE_DIR=${PDSERVE_STATE_DIR:-/tmp/pdserve-gpu}
pdserve() { "$PYTHON" -m pdserve "$@"; }

# Both workers on one card; NAME MODEL LENGTH
halves() {
  cat > "$OUT/$1.yaml" <<YAML
Common: {model: $2, max-model-len: $3}
Frontend: {served_model_name: demo, port: 8000}
VllmWorker:
  remote-prefill: true
  max-local-prefill-length: 64
  ServiceArgs: {resources: {gpu: 0.5}}
  common-configs: [model, max-model-len]
PrefillWorker:
  ServiceArgs: {resources: {gpu: 0.5}}
  common-configs: [model, max-model-len]
YAML
}

# A graph of FILE that runs while COMMAND does
while_serving() {
  local file=$1 code=0 pid; shift
  UCX_PROTO_INFO=y UCX_LOG_LEVEL=info pdserve serve -f "$file" > "$OUT/serve.log" 2>&1 &
  pid=$!
  until curl -sf localhost:8000/health > /dev/null; do
    kill -0 $pid 2> /dev/null || { tail -40 "$OUT/serve.log"; return 1; }
    sleep 1
  done
  "$@" || code=$?
  cp -r "$PDSERVE_STATE_DIR/logs" "$OUT/logs-$(date +%H%M%S)"
  kill -INT $pid && wait $pid
  return $code
}

has_gpu() { nvidia-smi -L 2> /dev/null | grep -q .; }

check() {  # what is here, and what the plan makes of it
  has_gpu && nvidia-smi
  pdserve doctor -f "$OUT/demo.yaml"
  if has_gpu; then pdserve plan -f "$OUT/demo.yaml"; else pdserve plan -f "$OUT/demo.yaml" --gpus 1xH100; fi
}

one_request() {  # a prompt that goes to the prefill worker
  local prompt; prompt=$(printf 'the river runs past the old mill and %.0s' {1..120})
  curl -sf -D - localhost:8000/v1/completions -H 'content-type: application/json' -H 'x-request-id: gpu-first' \
    -d "{\"model\": \"demo\", \"prompt\": \"$prompt\", \"max_tokens\": 32}" || return 1
  echo; pdserve status; pdserve trace gpu-first
  curl -s localhost:8000/metrics | grep -E '^pdserve_(kv_transfer|prefill_total|remote_prefill_failures)'
  grep -hE 'KV cache|memory|cuda_ipc|cuda_copy|tcp/' "$PDSERVE_STATE_DIR"/logs/*.log | tail -60
  nvidia-smi --query-compute-apps=pid,used_memory --format=csv
}

first() { while_serving "$OUT/demo.yaml" one_request; }

compare() {  # the goodput of one engine with the whole card, and of the graph
  pdserve compare -f "$OUT/demo.yaml" --minutes 8 --json "$OUT/compare.json"
}

grown() { [ -e "$MODEL/config.json" ] || "$PYTHON" -m tools.demo_model.grow --size "$SIZE" "$MODEL"; }

large() {  # planned against measured memory of a larger model
  grown && pdserve plan -f "$OUT/large.yaml" && while_serving "$OUT/large.yaml" one_request
}

idle() { nvidia-smi --query-gpu=utilization.gpu,power.draw --format=csv; top -bn1 | head -20; pdserve bench goodput --within 300 --json "$OUT/goodput.json"; }

goodput() { grown && while_serving "$OUT/large.yaml" idle; }

chaos() {  # answers token for token those of one engine, also while workers die
  pdserve chaos -f "$OUT/demo.yaml" --one-engine --workers 1 --dtype float32 \
    --only prefill-kill,prefill-hang,decode-kill,nats-kill --json "$OUT/chaos.json"
}

export OUT PYTHON SIZE MODEL
export -f pdserve halves while_serving has_gpu check one_request first compare grown large idle goodput chaos
halves demo demo 4096
halves large "$MODEL" 8192
failed=
for part in "${PARTS[@]}"; do
  case $part in check|first|compare|large|goodput|chaos) ;; *) echo "no part is called $part" >&2; exit 2;; esac
  if [ "$part" != check ] && ! has_gpu; then
    echo "gpu.sh: no GPU here: $part and what follows need one" >&2; exit 3
  fi
  echo "== $part"
  timeout -s INT -k 30 "$LIMIT" bash -c "$part" 2>&1 | tee "$OUT/$part.log" || failed="$failed $part"
done
[ -z "$failed" ] || { echo "gpu.sh: FAILED:$failed" >&2; exit 1; }
