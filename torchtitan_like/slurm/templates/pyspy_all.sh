#!/usr/bin/env bash
# Dump the Python stacks of all training processes on this machine, one file per process.
#
#   DIR/pyspy_all.sh [FOLDER] [py-spy's options, as --native or --locals]
#
#   FOLDER      for the files stack-<host>-rank<rank>-<pid>.txt (default: .)
#   PATTERN     text in the command line of a training process (default: -m torchtitan_like.train)
#   DRY_RUN=1   print the commands
#
# Needs py-spy (pip install py-spy) and the right to look at the processes: your own, where ptrace is allowed, or root's.
# Prints the names of the files, and how many ranks are in each function. Returns 1 if there is no process, or one cannot
# be read.
set -uo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
esac
folder=.
if [ $# -gt 0 ] && [[ "$1" != -* ]]; then
  folder=$1
  shift
fi
[ -n "${DRY_RUN:-}" ] || command -v py-spy >/dev/null || { echo "py-spy is not installed: pip install py-spy" >&2; exit 1; }
host=$(uname -n) host=${host%%.*}
mkdir -p "$folder"
code=1
tops=
for folder_of in /proc/[0-9]*; do
  pid=${folder_of#/proc/}
  words=$(tr '\0' ' ' <"$folder_of/cmdline" 2>/dev/null) || continue
  IFS= read -r -d '' program 2>/dev/null <"$folder_of/cmdline" || continue # a shell's command line may hold all the rest
  [[ "$program" == *python* && "$words" == *"${PATTERN:--m torchtitan_like.train}"* ]] || continue
  [[ "$words" != *torch.distributed.run* && "$words" != *torchtitan_like.torchrun* && "$pid" != "$$" ]] || continue
  rank=$(tr '\0' '\n' <"$folder_of/environ" 2>/dev/null | sed -n 's/^RANK=//p')
  file="$folder/stack-$host-rank${rank:-0}-$pid.txt"
  if [ -n "${DRY_RUN:-}" ]; then
    echo "py-spy dump --pid $pid $* >$file"
    code=0
  elif py-spy dump --pid "$pid" "$@" >"$file" 2>&1; then
    echo "$file"
    # The main thread has no name in a program that does not import threading; its id is the process's.
    tops+=$(sed -nE "/^Thread ($pid |.*\"MainThread\")/{n;s/^ *//;p;q}" "$file")$'\n'
    [ "$code" -eq 2 ] || code=0
  else
    echo "$file: $(head -n 1 "$file")" >&2
    code=2
  fi
done
[ -z "$tops" ] || printf '%s' "$tops" | sort | uniq -c | sort -rn
[ "$code" -ne 2 ] || exit 1
exit "$code"
