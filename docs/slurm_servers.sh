# Start vLLM servers on the last nodes of a Slurm job; slurm.sbatch reads this file where SERVER_NODES is set:
# `SERVER_NODES=1 SERVER_MODEL=HuggingFaceTB/SmolLM2-135M-Instruct sbatch --nodes 3 docs/slurm.sbatch policy=hf policy.path=... trainer=fsdp`.
# It leaves $servers, their step; $sampling, what the run is told of them; and $training_nodes, what srun is told of the others.
export SERVER_MODEL=${SERVER_MODEL:?the model that the servers start with, as policy.path} # hub id or directory, that of policy.path
export SERVER_DEVICES=${SERVER_DEVICES:-0 1 2 3 4 5 6 7} # of such a node: a server for each word, on these GPUs; "0,1 2,3" with --tensor-parallel-size 2
export SERVER_OPTIONS                                    # vLLM's, such as "--dtype bfloat16 --tensor-parallel-size 2"
export SERVER_PORT=${SERVER_PORT:-8000}                  # of the first server of a node
SERVER_SECONDS=${SERVER_SECONDS:-900}                    # longest start; a server that is late joins later

serve() { # is started again when it fails, and not told that the time is nearly up
    trap '' USR1
    local devices
    read -ra devices <<< "$SERVER_DEVICES"
    export CUDA_VISIBLE_DEVICES=${devices[$SLURM_LOCALID]}
    local port=$((SERVER_PORT + SLURM_LOCALID))
    until python -m datamodules.engines.serve "$SERVER_MODEL" --host "$SLURMD_NODENAME" --port $port $SERVER_OPTIONS; do
        sleep 5
    done
}
export -f serve

are_up() {
    python -c '
import sys, urllib.request as http
direct = http.build_opener(http.ProxyHandler({}))  # as the run itself goes
for url in sys.argv[1:]:
    direct.open(f"{url}/health", timeout=5)' "$@" 2> /dev/null
}

VLLM_API_KEY=$(python -c 'import secrets; print(secrets.token_urlsafe(32))') # of this job alone
export VLLM_API_KEY
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
count=$((${#nodes[@]} - SERVER_NODES))
[ $count -gt 0 ] || { echo "SERVER_NODES=$SERVER_NODES leaves none of ${#nodes[@]} nodes to train on"; exit 1; }
shares=$(wc -w <<< "$SERVER_DEVICES")
endpoints=()
for node in "${nodes[@]:count}"; do
    for ((i = 0; i < shares; i++)); do
        endpoints+=("http://$node:$((SERVER_PORT + i))")
    done
done
comma_separated() { local IFS=,; echo "$*"; }
training_nodes=(--nodes=$count --ntasks=$((count * SLURM_NTASKS_PER_NODE)) --nodelist="$(comma_separated "${nodes[@]:0:count}")")
sampling=(engine=vllm_server "engine.endpoints=[$(comma_separated "${endpoints[@]}")]")

srun --kill-on-bad-exit=0 --cpus-per-task=$((SLURM_NTASKS_PER_NODE * SLURM_CPUS_PER_TASK / shares)) --nodes="$SERVER_NODES" \
    --ntasks=$((SERVER_NODES * shares)) --ntasks-per-node="$shares" --nodelist="$(comma_separated "${nodes[@]:count}")" bash -c serve &
servers=$!
end=$((SECONDS + SERVER_SECONDS))
until are_up "${endpoints[@]}" || [ $SECONDS -gt $end ]; do
    kill -0 "$servers" 2> /dev/null || { echo "the servers' step has ended"; exit 1; }
    sleep 2
done
