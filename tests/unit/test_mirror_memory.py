import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from support import present

from deadpool_plugin.config import Config
from deadpool_plugin.errors import MemoryShortage
from deadpool_plugin.host import machine, proc
from deadpool_plugin.mirror.arena import MemoryBudget, budgets, check_memory

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


@pytest.mark.parametrize(
    ("parked", "starting", "limit_gib", "free_gib", "fits"),
    [
        (3, 0, 8.0, 50, True),  # four of 2 GiB
        (4, 0, 8.0, 50, False),
        (4, 0, None, 12, True),  # half of the 20 GiB that would be free without those that are parked
        (4, 0, None, 11, False),
        (1, 1, None, 11, True),  # two that begin take 5 GiB each for a while, and one GiB stays free
        (1, 2, None, 11, False),
        (0, 0, 0.0, 50, False),
    ],
)
def test_how_many_processes_may_be_parked(monkeypatch, parked, starting, limit_gib, free_gib, fits):
    free = MemoryBudget(free_gib * GIB, "meminfo", "")
    monkeypatch.setattr(machine, "budgets", lambda: [free])
    monkeypatch.setattr(proc, "memory_of", lambda pid: {7: (2 * GIB, 5 * GIB), 8: (GIB, GIB)}[pid])
    host = machine.Machine.__new__(machine.Machine)
    host._config = Config(memory_headroom_gib=1.0)
    limit = None if limit_gib is None else limit_gib * GIB
    assert host.fits_beside(parked, [7, 8], starting, limit) is fits


@pytest.mark.parametrize(("free_mib", "short"), [(511, True), (513, False)])
def test_a_host_whose_headroom_is_half_used_up_is_short_of_memory(monkeypatch, free_mib, short):
    monkeypatch.setattr(machine, "budgets", lambda: [MemoryBudget(free_mib << 20, "meminfo", "")])
    host = machine.Machine.__new__(machine.Machine)
    host._config = Config(memory_headroom_gib=1.0)
    assert host.is_short() is short


def test_a_process_tells_what_it_takes_and_what_it_took_at_most():
    code = "import sys; b'x' * (64 << 20); print('freed', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE) as process:
        present(process.stdout).readline()
        taken, most = proc.memory_of(process.pid)
        process.communicate()
    assert 1 << 20 < taken < 64 << 20 < most
    assert proc.memory_of(process.pid) == (0, 0)
