"""How much more CPU memory this node gives: what Linux has left, and what the processes' control group allows."""

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")  # there on Linux only
# Controller of a line in /proc/self/cgroup -> its folder, and the files of limit and use; version 2's has no name.
FILES = {"": ("", "memory.max", "memory.current"),
         "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")}  # fmt: skip


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> int:
    """Bytes that can be allocated without swapping, or being killed for it. OSError where there is no /proc."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    left = [int(fields["MemAvailable"].split()[0]) * 1024]
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controller, path = line.split(":", 2)
        if controller in FILES:
            folder, limit, used = FILES[controller]
            own = cgroups / folder / path.lstrip("/")
            groups = [group for group in (own, *own.parents) if group.is_relative_to(cgroups / folder)]
            left += [_left(group, limit, used) for group in groups if (group / limit).exists()]
    return max(0, min(left))


def _left(group: Path, limit: str, used: str) -> int:
    """Bytes below a group's limit; files that are cached give way."""
    most = (group / limit).read_text().strip()
    if most == "max":
        return 1 << 62
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(most) - int((group / used).read_text()) + int(statistics.get("inactive_file", 0))
