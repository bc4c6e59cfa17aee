"""Host memory as the kernel and control groups report it."""

import os

from torchtitan_like.util.host import HostMemory, host_memory

KIB = 1024


def memory_of(folder, cgroup, limits):
    """Read a fake /proc and /sys/fs/cgroup with 1000 KiB, of which 600 are available.

    ``limits`` maps folders of control groups to their files and contents.
    """
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    for name, files in limits.items():
        (cgroups / name).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (cgroups / name / file).write_text(content)
    return host_memory(proc, cgroups)


def test_memory_without_a_limit(tmp_path):
    memory = memory_of(tmp_path, "0::/\n", {".": {"memory.max": "max\n", "memory.current": "5"}})
    assert memory == HostMemory(1000 * KIB, 600 * KIB)


def test_limits_of_parent_groups_apply(tmp_path):
    """Slurm limits the job, not the task. The page cache counts as available."""
    job = {
        "memory.max": str(500 * KIB),
        "memory.current": str(400 * KIB),
        "memory.stat": f"anon 1\ninactive_file {50 * KIB}\n",
    }
    limits = {
        "slurm/job_1": job,
        "slurm/job_1/step_0": {"memory.max": "max", "memory.current": "1"},
    }
    memory = memory_of(tmp_path, "0::/slurm/job_1/step_0\n", limits)
    assert memory == HostMemory(500 * KIB, 150 * KIB)


def test_limits_of_cgroup_version_1_apply(tmp_path):
    files = {"memory.limit_in_bytes": str(300 * KIB), "memory.usage_in_bytes": str(100 * KIB)}
    text = "5:cpu,cpuacct:/docker\n4:memory:/docker/abc\n"
    memory = memory_of(tmp_path, text, {"memory/docker/abc": files})
    assert memory == HostMemory(300 * KIB, 200 * KIB)


def test_a_limit_above_the_memory_of_the_machine_is_ignored(tmp_path):
    """Version 1 represents "no limit" as a huge number."""
    files = {"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": "1"}
    memory = memory_of(tmp_path, "4:memory:/\n", {"memory": files})
    assert memory == HostMemory(1000 * KIB, 600 * KIB)


def test_physical_memory_is_used_without_proc(tmp_path):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory(tmp_path, tmp_path) == HostMemory(physical, physical)


def test_memory_of_this_machine():
    memory = host_memory()
    assert 0 < memory.available <= memory.total
