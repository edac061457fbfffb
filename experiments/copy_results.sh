#!/usr/bin/env bash
# Copy the packed results of a job of experiments/text_job.sh, at any time while it runs.
#
#   bash experiments/copy_results.sh FOLDER TARGET [SECONDS [NAME ...]]
#
# FOLDER is that of the job. Waits until the job has ended, SECONDS (0) at most. Then copies FOLDER/NAME to TARGET/NAME for each
# NAME (back back-judged), and prints the end of FOLDER/job.log and what needs a transfer of its own. A NAME is a link to the
# newest version (experiments/job_results.py). `cd -P` enters one version, so that no file is of another one.
set -uo pipefail
folder=$1 seconds=${3:-0}
mkdir -p "$2"
target=$(cd -P "$2" && pwd)
shift $(($# < 3 ? $# : 3))
[ $# -gt 0 ] || set -- back back-judged
end=$(($(date +%s) + seconds))
until [ "$(date +%s)" -ge "$end" ] || grep -q 'the job ended' "$folder/job.log"; do sleep 5; done
for name in "$@"; do
    [ -L "$folder/$name" ] && (cd -P "$folder/$name" && mkdir -p "$target/$name" && cp -- * "$target/$name/")
done
tail -n 4 "$folder/job.log"
for link in "$folder"/back-[0-9]*; do
    [ -L "$link" ] && echo "more results: copy_results.sh $folder TARGET 0 ${link##*/}"
done
exit 0
