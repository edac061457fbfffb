#!/usr/bin/env bash
# Rows of a text entry on a machine with a time limit: training, samples, audits, judges, and results to copy away.
#
#   bash experiments/text_job.sh FOLDER ENTRY ROWS SECONDS [OPTIONS OF text_job.py ...] [-- OPTIONS OF text.py ...]
#   setsid nohup bash experiments/text_job.sh /data methods sedd,m2s-offset 1600 > /data/job.log 2>&1 < /dev/null &
#
# FOLDER has text (`m2s data prepare`), and for the judges judges-parts (`transfer.py split $M2S_DATA/judges ...`) and adversaries
# (`m2s data adversaries`). They may arrive while rows are trained. Results are packed in FOLDER/back and FOLDER/back-judged after
# each row, each stage and each judged set. Copy them away at any time while the job runs (`copy_results.sh FOLDER TARGET`).
# Everything ends SECONDS after the start. FOLDER/end has that time as seconds since 1970, and may be changed while the job runs.
#
# Levels are those of text_job.py. Judges read the samples of level 1, and at the end those of the other levels. FOLDER/process
# has the number of the process that works now. `kill $(cat FOLDER/process)` ends it: it saves what it has, packs it, and the job
# continues with its next part. So a slow stage of level 1 is skipped, judges read what there is, and the stage resumes after
# them if there is time. Kill by this number alone, never by a name.
#
# Environment: OUT, the folder of runs (FOLDER/out; better in memory); PYTHON; JUDGES, names separated by spaces, empty for none;
# JUDGE_SECONDS, the seconds before the end in which level 1 stops so that judges can read (200).
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$1 entry=$2 rows=$3 seconds=$4
shift 4
job=() text=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do job+=("$1"); shift; done
[ $# -gt 0 ] && text=("${@:2}")
python=${PYTHON:-python3} out=${OUT:-$folder/out} judges=${JUDGES-gemma-3-270m smollm2-135m-instruct}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$out-inductor} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out-triton}
echo $(($(date +%s) + seconds)) > "$folder/end"

work() { # a command whose process can be killed by its number
    "$@" &
    echo $! > "$folder/process"
    wait $! || echo "process $! ended with code $?"
    rm -f "$folder/process"
}

left() { echo $(($(cat "$folder/end") - $(date +%s) - $1)); } # seconds until $1 seconds before the end

rows() { # level, seconds to leave
    [ "$(left "$2")" -gt 0 ] || return 0
    work "$python" experiments/text_job.py "$out" --data "$folder/text" --entry "$entry" --rows "$rows" --level "$1" --seconds "$(left "$2")" \
        --bundle "$folder/back" ${job[@]+"${job[@]}"} -- --speeds experiments/results/text-rates.json ${text[@]+"${text[@]}"}
    echo "level $1 ended, $(left 0) s left"
}

judge() { # seconds to leave
    [ -n "$judges" ] && [ "$(left "$1")" -gt 0 ] || return 0
    [ -d "$folder/m2s/judges" ] || "$python" experiments/transfer.py join "$folder/judges-parts" "$folder/m2s" || return 0
    "$python" experiments/text_judges.py pack "$out" --data "$folder/text" --adversaries "$folder/adversaries" \
        --out "$folder/for-judges" || return 0
    # shellcheck disable=SC2086  # several names
    M2S_DATA=$folder/m2s work "$python" experiments/text_judges.py judge "$folder/for-judges" "$folder/judged" --judges $judges \
        --seconds "$(left "$1")" --bundle "$folder/back-judged"
    echo "judges ended, $(left 0) s left"
}

echo "the job begins, $(left 0) s left"
rows 1 "$([ -n "$judges" ] && echo "${JUDGE_SECONDS:-200}" || echo 60)"
judge 30
rows 3 100
judge 10
echo "the job ended, $(left 0) s left"
