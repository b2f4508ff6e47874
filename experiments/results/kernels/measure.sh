#!/usr/bin/env bash
# Every figure of the kernels on one H200, most important first: measure.sh OUT [SECONDS] [STEP...]
#
# OUT gets a .md and .json of each benchmark, written after every row, a .log of each step and steps.txt, which says how
# each ended. A step that does not fit into what is left of SECONDS (360) is cut short or left out. STEPs: frozen train
# kl variants small variants_train check suite replay (default: all). Environment:
#   PYTHON        the interpreter (python)
#   LIMIT         seconds of a row, with what it compiles (40)
#   UNSLOTH_SITE  folder with Unsloth's packages, which want another version of TRL than the TRL row
#   ABLATE_COMMIT the commit, where the code runs without its .git
#   RUN           folder of a run with stored rollouts, for `replay`
set -u
(($# >= 1)) || { sed -n '2,12s/^# \?//p' "$0"; exit 2; }
mkdir -p "$1"
out=$(realpath "$1")
total=${2:-360}
shift $(($# < 2 ? $# : 2))
steps=${*:-frozen train kl variants small variants_train check suite replay}
cd "$(dirname "$0")/../../.." || exit 2
python=${PYTHON:-python}
limit=(--limit "${LIMIT:-40}")
site=(${UNSLOTH_SITE:+--site "unsloth=$UNSLOTH_SITE"})
export PYTHONUNBUFFERED=1
SECONDS=0

run() { # NAME MOST COMMAND...: a step's command for at most MOST seconds
    local name=$1 most=$2 start=$SECONDS left=$((total - SECONDS))
    shift 2
    ((most < left)) || most=$left
    ((most >= 5)) || { echo "$name: left out, no time" | tee -a "$out/steps.txt"; return; }
    timeout -k 5 "$most" "$@" >"$out/$name.log" 2>&1
    local code=$?
    ((code == 124 || code == 137)) && code="cut short"
    echo "$name: exit $code, $((SECONDS - start)) s" | tee -a "$out/steps.txt"
}

bench() { # NAME MOST TOKENS HIDDEN VOCAB OPTION...
    local name=$1 most=$2 shape=(--tokens "$3" --batch 8 --hidden "$4" --vocab "$5" --dtype bfloat16 --device cuda)
    shift 5
    run "$name" "$most" "$python" -m losses.bench "${shape[@]}" "${limit[@]}" --out "$out/$name" "$@"
}

large=(16384 4096 128256)
peers=full,trl,unsloth,liger,cce
some=reference,dapo,dr_grpo,gspo,full_reverse_kl,k2_is,k3_is,kl_in_reward_token
kernels=(product finalize rescale own_ scale quantize token_terms completion_sums add_ bias_gradient logits_tile
    divergence_rows write_rows)

for step in $steps; do
    case $step in
    frozen) bench frozen 120 "${large[@]}" --rows triton,triton-fp8,$peers --reps 3 --steps 3 "${site[@]}" ;;
    train) bench train 100 "${large[@]}" --head train --rows triton,$peers,triton-fp8 --reps 3 --steps 3 "${site[@]}" ;;
    kl)
        run exact_kl 70 "$python" -m losses.bench_kl --tokens 16384 --batch 8 --hidden 4096 --vocab 128256 \
            --dtype bfloat16 --device cuda --rows triton,value,trl,chunked,liger --reps 3 --steps 3 "${limit[@]}" \
            --out "$out/exact_kl"
        ;;
    variants) bench variants 45 "${large[@]}" --rows triton --variant $some --reps 5 --no-memory ;;
    small)
        bench small-576 30 16384 576 49152 --rows triton,full --reps 5 --steps 10
        bench small-1536 30 16384 1536 151936 --rows triton,full --reps 5 --steps 3
        ;;
    variants_train) bench variants_train 60 "${large[@]}" --head train --rows triton --variant $some --reps 5 --no-memory ;;
    check)
        sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
        run memcheck 60 "$sanitizer" --tool memcheck --error-exitcode 9 "$python" -m tests.gpu.small --tiny
        run racecheck 60 "$sanitizer" --tool racecheck --error-exitcode 9 "${kernels[@]/#/--kernel-name=kns=}" \
            "$python" -m tests.gpu.small --tiny
        ;;
    suite)
        # A process for each file, side by side; what is timed comes alone afterwards.
        run suite 150 bash -c '
            log=$1; shift; failed=0; pids=()
            for file in tests/triton/test_*.py tests/gpu/test_*.py; do
                "$@" -m pytest -q -p no:cacheprovider -k "not costs_nothing" "$file" >"$log.$(tr / - <<<"${file%.py}")" 2>&1 &
                pids+=($!)
            done
            for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
            tail -qn 3 "$log".tests-*
            exit $failed' suite "$out/suite" "$python"
        run suite_timed 40 "$python" -m pytest -q -p no:cacheprovider -k costs_nothing tests/gpu/test_gpu.py
        ;;
    replay)
        if [[ -n ${RUN:-} ]]; then
            run replay 90 "$python" -m ablate replay "run=$RUN" variants=family backends=triton,chunked,reference device=cuda
        else
            echo "replay: left out, RUN names no run" | tee -a "$out/steps.txt"
        fi
        ;;
    *) echo "$step: no such step" | tee -a "$out/steps.txt" ;;
    esac
done
