#!/usr/bin/env bash
# What is in this machine, and what is near to what? Cores and memory, NUMA nodes, GPUs, network cards, and who is on which.
#
#   scripts/node_info.sh                                          this machine
#   scripts/slurm/on_nodes.sh JOB "$PWD/scripts/node_info.sh"     every node of a job: nodes of one kind should say the same
#
# A rank should run on the cores of its GPU's NUMA node: NUMA_BINDING=node ./run_train.sh. In the matrix, NV is NVLink, PIX and
# PXB are PCIe switches, NODE is within a NUMA node, SYS is between two: a network card should be PIX or PXB to its GPUs.
set -uo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
esac
sys=${SYS:-/sys} # another one in tests
numa_node() { # of a device's folder; -1 where there is only one, or nobody knows
  cat "$1/numa_node" 2>/dev/null || echo -1
}

echo "host: $(uname -n), Linux $(uname -r)"
echo "memory: $(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 2 ^ 20 }' /proc/meminfo 2>/dev/null)"
echo "cores for this process: $(env -u OMP_NUM_THREADS nproc)" # which would count as the cores
lscpu 2>/dev/null | grep -E '^(Model name|Socket|Core|Thread|NUMA)' | sed -E 's/ {2,}/ /'
while IFS=', ' read -r index bus name; do
  bus=${bus,,}
  folder=$sys/bus/pci/devices/${bus#0000} # nvidia-smi's domain has eight digits, the kernel's four
  echo "GPU $index: NUMA node $(numa_node "$folder"), cores $(cat "$folder/local_cpulist" 2>/dev/null || echo '?'), $name"
done < <(nvidia-smi --query-gpu=index,pci.bus_id,name --format=csv,noheader 2>/dev/null)
for card in "$sys"/class/infiniband/*; do
  [ -e "$card" ] || continue
  rate=$(cat "$card"/ports/1/rate 2>/dev/null || echo '?')
  echo "InfiniBand ${card##*/}: NUMA node $(numa_node "$card/device"), $rate, $(cat "$card"/ports/1/state 2>/dev/null || echo '?')"
done
for card in "$sys"/class/net/*; do
  [ -e "$card/device" ] || continue # loopback and virtual ones
  echo "network ${card##*/}: NUMA node $(numa_node "$card/device"), $(cat "$card/speed" 2>/dev/null || echo '?') Mbit/s"
done
nvidia-smi topo -m 2>/dev/null || true
