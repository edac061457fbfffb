#!/usr/bin/env bash
# Copy the packed results of a job of experiments/text_job.sh, at any time while it runs.
#
#   bash experiments/copy_results.sh FOLDER TARGET [SECONDS [NAME ...]]
#
# FOLDER is that of the job. For each NAME (back back-judged) FOLDER/NAME is copied to TARGET/NAME, which is replaced. This is
# repeated with every new version until the job has ended, for SECONDS (0) at most. So TARGET also has results where this command
# is stopped. Then it prints the end of FOLDER/job.log, and the names that need a transfer of their own.
#
# A NAME is a link to the newest version (experiments/job_results.py). `cd -P` enters one version, so that all files are of it.
set -uo pipefail
folder=$1 seconds=${3:-0}
mkdir -p "$2"
target=$(cd -P "$2" && pwd)
shift $(($# < 3 ? $# : 3))
[ $# -gt 0 ] || set -- back back-judged
end=$(($(date +%s) + seconds))
declare -A copied=()

copy() { # names
    for name in "$@"; do
        version=$(readlink "$folder/$name") || continue
        [ "${copied[$name]-}" = "$version" ] && continue
        (cd -P "$folder/$name" && rm -rf "${target:?}/$name" && mkdir "$target/$name" && cp -- * "$target/$name/") &&
            copied[$name]=$version
    done
}

until [ "$(date +%s)" -ge "$end" ] || grep -qs 'the job ended' "$folder/job.log"; do
    copy "$@"
    sleep 5
done
copy "$@"
tail -n 4 "$folder/job.log"
for link in "$folder"/back-[0-9]*; do
    [ -L "$link" ] && echo "more results: copy_results.sh $folder TARGET 0 ${link##*/}"
done
exit 0
