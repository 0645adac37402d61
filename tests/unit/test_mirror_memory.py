from pathlib import Path

import pytest

from deadpool_plugin.errors import MemoryShortage
from deadpool_plugin.mirror.arena import budgets, check_memory

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {64 * GIB // 1024} kB\n"})
    return tmp_path


def test_available_memory_counts(root: Path) -> None:
    check_memory(63 * GIB, GIB, root)
    with pytest.raises(MemoryShortage, match=r"need 63\.50 GiB .* keeps 1\.00 GiB free.* only 64\.00 GiB") as caught:
        check_memory(63 * GIB + GIB // 2, GIB, root)
    assert "memory_headroom_gib" in str(caught.value) and caught.value.exit_code == 78


def test_the_tightest_cgroup_above_us_counts(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/slice/memory.max": f"{10 * GIB}",
            "sys/fs/cgroup/slice/memory.current": f"{7 * GIB}",
            "sys/fs/cgroup/slice/memory.stat": f"anon 5\ninactive_file {GIB // 4}\nactive_file {3 * GIB // 4}\n",
            "sys/fs/cgroup/slice/job/memory.max": "max",
        },
    )
    assert [budget.available_bytes for budget in budgets(root)] == [4 * GIB, 64 * GIB]
    check_memory(3 * GIB, GIB, root)
    with pytest.raises(MemoryShortage, match=r"limit 10\.00 GiB, used 7\.00 GiB of which 1\.00 GiB can be dropped"):
        check_memory(3 * GIB + 1, GIB, root)


def test_cgroup_v1_in_a_container_that_sees_only_its_part(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
            "sys/fs/cgroup/memory/memory.stat": "active_file 1\ninactive_file 1\n"
            f"total_inactive_file {GIB // 4}\ntotal_active_file {GIB // 4}\n",
        },
    )
    assert budgets(root)[0].available_bytes == GIB + GIB // 2


def test_no_limit_is_no_budget(root: Path) -> None:
    write(
        root, {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    )
    assert len(budgets(root)) == 1


def test_the_real_host_has_a_budget() -> None:
    assert budgets()[0].available_bytes > 0
