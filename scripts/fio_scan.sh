#!/usr/bin/env bash
# Measure the speed of a disk: read and write files of 16 KiB, 1 MiB and 1 GiB with 16 processes. Prints a Markdown table.
#
#   scripts/fio_scan.sh FOLDER
#
#   FOLDER      on the disk; test files are made in it and removed (16 GiB of room for the defaults)
#   SIZES       default: 16k 1m 1g
#   JOBS        processes at once (default: 16)
#   SECONDS_EACH
#               time of each measurement (default: 60), of which there are two for each size
#   ENGINE      fio's ioengine (default: libaio)
#   DRY_RUN=1   print the commands
#
# Small files are what an import of Python modules reads, large ones are checkpoints and token files. The page cache is left
# out (--direct=1). Needs fio. Returns 1 when a measurement fails, as on a file system without direct access.
set -uo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
esac
folder=${1:?a folder on the disk}
[ -d "$folder" ] || { echo "$folder is no folder" >&2; exit 78; }
[ -n "${DRY_RUN:-}" ] || command -v fio >/dev/null || { echo "fio is not there: apt install fio" >&2; exit 1; }

speed() { # size, read or write -> MB/s and operations per second, separated by a blank
  local output words=(fio --name="scan-$2-$1" --directory="$folder" --rw="$2" --filesize="$1" --bs="$([ "$1" = 16k ] && echo 16k || echo 1m)"
    --numjobs="${JOBS:-16}" --ioengine="${ENGINE:-libaio}" --iodepth=16 --direct=1 --unlink=1 --time_based
    --runtime="${SECONDS_EACH:-60}" --ramp_time=2 --group_reporting --output-format=json)
  if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${words[@]}" >&3
    echo >&3
    return
  fi
  output=$("${words[@]}") || return
  # fio may print notes before the JSON.
  "${PYTHON:-python3}" -c 'import json, sys
text = sys.stdin.read()
result = json.loads(text[text.index("{"):])["jobs"][0][sys.argv[1]]
print(round(result["bw_bytes"] / 1e6), round(result["iops"]))' "$2" <<<"$output"
}

exec 3>&1
code=0
rows=()
for size in ${SIZES:-16k 1m 1g}; do
  read -r read_speed read_ops <<<"$(speed "$size" read)"
  read -r write_speed write_ops <<<"$(speed "$size" write)"
  rows+=("| $size | ${read_speed:-failed} | ${read_ops:-} | ${write_speed:-failed} | ${write_ops:-} |")
  [ -n "${read_speed:-}" ] && [ -n "${write_speed:-}" ] || code=1
done
[ -z "${DRY_RUN:-}" ] || exit 0
echo "| file size | read MB/s | reads/s | write MB/s | writes/s |"
echo "| --- | --- | --- | --- | --- |"
printf '%s\n' "${rows[@]}"
exit "$code"
