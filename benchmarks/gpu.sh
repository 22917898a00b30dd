#!/usr/bin/env bash
# Measure pdserve on a GPU, the most valuable parts first: see docs/gpu.md.
#   benchmarks/gpu.sh OUT [PART...]      parts: check, graph, float32, large, one-engine, chaos (default: all of them)
# Logs and figures go to OUT. PYTHON is the interpreter that has vLLM (.venv/bin/python), PORT that of the API (8000),
# SIZE that of the larger model (1.5B), MINUTES how long its goodput is searched (4), LIMIT the seconds that a part may
# take (560). Exit code 1 if a part failed, 3 without a GPU. SIM=1 tries this script with simulated engines.
set -uo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || { sed -n '2,6s/^# //p' "$0"; exit 2; }
OUT=$(realpath -m "$1") && mkdir -p "$OUT" && shift
PARTS=("$@") && [ $# -gt 0 ] || PARTS=(check graph float32 large one-engine chaos)
PYTHON=${PYTHON:-.venv/bin/python} PORT=${PORT:-8000} SIZE=${SIZE:-1.5B} MINUTES=${MINUTES:-4} LIMIT=${LIMIT:-560} SIM=${SIM:-}
MODEL=${MODEL:-/tmp/pdserve-gpu-$SIZE} URL=http://127.0.0.1:$PORT
export PYTHONPATH=$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH} PDSERVE_STATE_DIR=$OUT/state
pdserve() { "$PYTHON" -m pdserve "$@"; }
has_gpu() { nvidia-smi -L 2> /dev/null | grep -q .; }
card() { has_gpu && nvidia-smi "--query-$1" --format=csv; }

# The graphs, and one engine without a graph

halves() {  # NAME MODEL LENGTH [LINE...]: both workers on the one card
  local name=$1 keys="model, max-model-len, block-size" worker="ServiceArgs: {resources: {gpu: 0.5}}" line
  local common=("model: $2" "max-model-len: $3" "block-size: 32" "${@:4}")
  [ -z "$SIM" ] || worker="engine: sim"
  for line in "${@:4}"; do keys+=", ${line%%:*}"; done
  {
    printf '%s\n' "Frontend: {served_model_name: demo, port: $PORT}" Common: "${common[@]/#/  }"
    printf '%s\n' VllmWorker: "  remote-prefill: true" "  max-local-prefill-length: 64" "  $worker" "  common-configs: [$keys]"
    printf '%s\n' PrefillWorker: "  $worker" "  common-configs: [$keys]"
  } > "$OUT/$name.yaml"
}

engine() {  # MODEL [ARGUMENT...]
  if [ -n "$SIM" ]; then
    sed '/^PrefillWorker/,$d; /remote-prefill/d; /max-local/d' "$OUT/demo.yaml" > "$OUT/one.yaml"
    exec "$PYTHON" -m pdserve serve -f "$OUT/one.yaml"
  else
    exec "$PYTHON" -m vllm.entrypoints.launchers.api_server.entry --model "$1" --served-model-name demo --port "$PORT" \
      --block-size 32 "${@:2}"
  fi
}

# Run a command while a server runs

while_up() {  # NAME READY COMMAND SERVER [WORD...]
  local log=$OUT/$1.log ready=$2 command=$3 began=$SECONDS code=0; shift 3
  trap stop EXIT; trap 'exit 1' TERM  # the part's time is over
  : > "$log"
  set -m  # the server gets a process group of its own, and heeds SIGINT, which a script's background commands ignore
  "$@" >> "$log" 2>&1 &
  set +m
  until "$ready" "$log"; do
    kill -0 $! 2> /dev/null || { tail -40 "$log"; echo "error: the server ended while it started, see $log"; return 1; }
    sleep 0.5
  done
  echo "measured: ready after $((SECONDS - began)) s"
  "$command" || code=$?
  stop
  return "$code"
}

stop() {
  trap '' TERM; trap - EXIT  # `timeout` sends TERM twice
  local began=$SECONDS
  kill -INT $! 2> /dev/null
  while kill -0 $! 2> /dev/null && [ $((SECONDS - began)) -lt 60 ]; do sleep 0.2; done
  kill -0 $! 2> /dev/null && echo "error: the server did not stop" || echo "measured: stopped after $((SECONDS - began)) s"
  kill -KILL -- "-$!" 2> /dev/null  # what is left of an engine
  trap - TERM
}

complete() { grep -q '^Ready after' "$1"; }  # /health is ok before the prefill worker is there
answers() { curl -sf -m 5 "$URL/health" > /dev/null; }
serving() { UCX_PROTO_INFO=y UCX_LOG_LEVEL=info while_up "serve-$1" complete "$2" "$PYTHON" -m pdserve serve -f "$OUT/$1.yaml"; }

# The parts

check() {  # what is here, and what the plan makes of it
  has_gpu && nvidia-smi
  pdserve doctor -f "$OUT/demo.yaml"
  if has_gpu; then pdserve plan -f "$OUT/demo.yaml"; else pdserve plan -f "$OUT/demo.yaml" --gpus 1xH100; fi
}

one_request() {  # a prompt that goes to the prefill worker
  local prompt; prompt=$(printf 'the river runs past the old mill and %.0s' {1..120})
  curl -sf -m 60 -D - "$URL/v1/completions" -H 'content-type: application/json' -H 'x-request-id: gpu-first' \
    -d "{\"model\": \"demo\", \"prompt\": \"$prompt\", \"max_tokens\": 32}" | tee "$OUT/first.http" || return 1
  echo; pdserve status; pdserve trace gpu-first
  curl -s -m 10 "$URL/metrics" | grep -E '^pdserve_(kv_transfer_seconds_(sum|count)|kv_transfer_bytes|prefill_total|remote_prefill_fail)'
  grep -haoE '(cuda_ipc|cuda_copy|tcp|cma|rc_mlx5)/[A-Za-z0-9_]+' "$PDSERVE_STATE_DIR"/logs/*.log | sort | uniq -c
  grep -haE 'ucp_(get|put).*cuda|VRAM|KV cache|memory|attention backend' "$PDSERVE_STATE_DIR"/logs/*.log | sort -u | tail -60
  card compute-apps=pid,used_memory
  grep -qi '^x-pdserve-prefill: remote' "$OUT/first.http" || { echo "error: the first prompt was not prefilled remotely"; return 1; }
}

reference() { "$PYTHON" benchmarks/gpu_answers.py "$URL" "$OUT/$name.json"; }
compared() {
  one_request || return 1
  "$PYTHON" benchmarks/gpu_answers.py "$URL" "$OUT/$name-graph.json" "$OUT/$name.json" || [ "$name" = demo ]
}

same() {  # NAME DTYPE: are the answers of the graph, token for token, those of one engine?
  local name=$1
  while_up "engine-$name" answers reference engine "$DEMO" --enforce-eager --max-model-len 4096 --dtype "$2" \
    && serving "$name" compared
}

graph() { same demo bfloat16; }  # may differ: its sums depend on the size of a batch
float32() { same demo32 float32; }  # must not differ

goodput() { pdserve bench goodput "$@" --ttft 500ms --gap 60ms --seconds 10 --within $((MINUTES * 60)); }
grown() { [ -n "$SIM" ] || [ -e "$MODEL/config.json" ] || "$PYTHON" -m tools.demo_model.grow --size "$SIZE" "$MODEL"; }

measured() {  # memory and power of the idle graph, and its goodput
  one_request; top -bn1 | head -20; card gpu=memory.used,power.draw,utilization.gpu
  goodput --json "$OUT/goodput-graph.json"
}
large() { grown && pdserve plan -f "$OUT/large.yaml" && serving large measured; }

alone() { goodput --base-url "$URL/v1" --json "$OUT/goodput-one.json"; }
one-engine() { grown && while_up engine-large answers alone engine "$MODEL" --max-model-len 8192; }

chaos() {  # answers equal those of one engine, token for token, also while workers die
  pdserve chaos -f "$OUT/demo.yaml" --one-engine --workers 1 --dtype float32 \
    --only prefill-kill,prefill-hang,decode-kill,nats-kill --json "$OUT/chaos.json"
}

DEMO=$("$PYTHON" -c 'from pdserve.demo import MODEL_DIR; print(MODEL_DIR)') || exit 1
halves demo demo 4096 "enforce-eager: true" "dtype: bfloat16"
halves demo32 demo 4096 "enforce-eager: true" "dtype: float32"
halves large "$([ -n "$SIM" ] && echo demo || echo "$MODEL")" "$([ -n "$SIM" ] && echo 4096 || echo 8192)"
failed=
for part in "${PARTS[@]}"; do
  case $part in check|graph|float32|large|one-engine|chaos) ;; *) echo "no part is called $part" >&2; exit 2;; esac
  if [ "$part" != check ] && [ -z "$SIM" ] && ! has_gpu; then
    echo "gpu.sh: no GPU here: $part and what follows need one" >&2; exit 3
  fi
  echo "== $part"
  export OUT PYTHON PORT SIZE MINUTES SIM MODEL URL DEMO
  : > "$OUT/$part.log"  # `tail` must find it
  timeout -k 90 "$LIMIT" bash -c "set -o pipefail; $(declare -f); $part" >> "$OUT/$part.log" 2>&1 & running=$!
  trap 'kill "$running"; wait "$running"; exit 130' HUP INT TERM  # the part stops its server, as on a timeout
  tail -n +1 -s 0.2 -f --pid "$running" "$OUT/$part.log" & shown=$!
  wait "$running" || failed="$failed $part"
  wait "$shown"
done
[ -z "$failed" ] || { echo "gpu.sh: FAILED:$failed" >&2; exit 1; }
