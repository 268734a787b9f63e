"""Machine settings: cores that a process may use, the allocator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from lightning_ipu import machine
from lightning_ipu.precision import names as precision


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _siblings(groups: dict[int, str]) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n" for cpu, text in groups.items()}


def test_without_a_quota_every_core_of_the_affinity_mask_counts(tmp_path):
    assert machine.usable_cores(root=tmp_path) == len(os.sched_getaffinity(0))


def test_hyper_threads_of_one_core_count_once(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    root = _tree(tmp_path, _siblings({cpu: ",".join(map(str, cpus)) for cpu in cpus}))
    assert machine.usable_cores(root=root) == 1


def test_processes_get_shares_of_whole_cores_socket_by_socket(tmp_path, monkeypatch):
    # Two sockets, numbered in turn, of three cores with two hyper-threads each.
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    sockets = {f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id": f"{cpu % 2}\n" for cpu in range(12)}
    root = _tree(tmp_path, sockets | _siblings({cpu: f"{cpu % 6},{cpu % 6 + 6}" for cpu in range(12)}))
    cores = [{0, 6}, {2, 8}, {4, 10}, {1, 7}, {3, 9}, {5, 11}]
    assert machine.share_of_cores(0, 1, root=root) == cores
    for processes in range(1, 7):
        shares = [machine.share_of_cores(place, processes, root=root) for place in range(processes)]
        assert [core for share in shares for core in share] == cores
        assert {len(share) for share in shares} <= {6 // processes, -(-6 // processes)}
    assert machine.share_of_cores(6, 7, root=root) == []


_OWN_CORES = """
LIGHT_START = True
import os, sys, threading
from lightning_ipu import machine
def masks():
    return {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
done = threading.Event()
threading.Thread(target=done.wait).start()
with machine.own_cores(1, 2, threads=int(sys.argv[1])):
    print(*masks())
print(*masks())
done.set()
"""


@pytest.mark.skipif(machine.usable_cores() < 2, reason="two processes need two cores")
@pytest.mark.parametrize("why", ["bound", "too many threads", "bound by the launcher"])
def test_a_process_keeps_to_its_cores_unless_it_was_given_others_or_has_too_many_threads(why):
    first = machine.share_of_cores(0, 1)[0]
    before = os.sched_getaffinity(0)
    done = subprocess.run(
        [sys.executable, "-c", _OWN_CORES, "99" if why == "too many threads" else "1"],
        env={**os.environ, **({"TORCHELASTIC_RUN_ID": "7"} if why == "bound by the launcher" else {})},
        preexec_fn=(lambda: os.sched_setaffinity(0, first)) if why == "bound by the launcher" else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    mine = {"bound": set().union(*machine.share_of_cores(1, 2)), "too many threads": before, "bound by the launcher": first}[why]
    after = first if why == "bound by the launcher" else before
    assert done.stdout.splitlines() == [str(frozenset(mine)), str(frozenset(after))]


MIB = 1 << 20
V1, V2 = "sys/fs/cgroup/memory/job/memory.", "sys/fs/cgroup/jobs/one/memory."


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 0),
        ({"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:    2048 kB\n"}, 2 * MIB),
        ({"proc/self/cgroup": "0::/jobs/one\n", V2 + "max": "max\n", V2 + "current": f"{9 * MIB}\n"}, 64 * MIB),
        ({"proc/self/cgroup": "0::/jobs/one\n", V2 + "max": f"{20 * MIB}\n", V2 + "current": f"{9 * MIB}\n"}, 11 * MIB),
        (
            {  # what it keeps of files can be given up
                "proc/self/cgroup": "0::/jobs/one\n",
                V2 + "max": f"{20 * MIB}\n",
                V2 + "high": f"{15 * MIB}\n",
                V2 + "current": f"{9 * MIB}\n",
                V2 + "stat": f"anon 1\nfile 2\ninactive_file {4 * MIB}\nactive_file 5\n",
            },
            10 * MIB,
        ),
        (  # of the level above; and more in use than is allowed
            {"proc/self/cgroup": "0::/jobs/one\n", "sys/fs/cgroup/memory.max": f"{MIB}\n", "sys/fs/cgroup/memory.current": f"{2 * MIB}\n"},
            0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/x\n9:memory:/job\n",
                V1 + "limit_in_bytes": f"{30 * MIB}\n",
                V1 + "usage_in_bytes": f"{10 * MIB}\n",
                V1 + "stat": f"inactive_file 7\ntotal_inactive_file {3 * MIB}\n",
            },
            23 * MIB,
        ),
        ({"proc/self/cgroup": "9:memory:/job\n", V1 + "limit_in_bytes": "9223372036854771712\n", V1 + "usage_in_bytes": "5\n"}, 64 * MIB),
    ],
)
def test_free_memory_is_what_the_system_and_the_control_groups_leave(tmp_path, files, free):
    available = {"proc/meminfo": f"MemTotal: 99999 kB\nMemAvailable: {64 * 1024} kB\n"} if "proc/self/cgroup" in files else {}
    assert machine.free_memory(root=_tree(tmp_path, available | files)) == free
    assert 0 < machine.free_memory() < 1 << 60  # of this machine


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/jobs/one\n", "sys/fs/cgroup/jobs/one/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/jobs/one\n", "sys/fs/cgroup/jobs/cpu.max": "50000 100000\n"}, 0.5),  # of the level above
        ({"proc/self/cgroup": "0::/jobs/one\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),  # seen from inside a container
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_the_tightest_quota_of_the_control_group_counts(tmp_path, files, quota):
    root = _tree(tmp_path, files)
    assert machine._cgroup_quota(root) == quota
    cores = len(os.sched_getaffinity(0))
    assert machine.usable_cores(root=root) == (cores if quota is None else max(1, min(cores, int(quota))))


# Allocates, touches and frees 64 MiB twice; prints the page faults of the second time.
_FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def once():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
once()
print(once())
"""
_SETTING = """
import sys
from lightning_ipu import machine
print(int(sys.argv[1] == "keep" and machine.keep_freed_memory()))
"""
_COMMAND = """
import sys, torch
from pytorch_lightning import LightningModule
from resnet_ipu.__main__ import main
threads = []
LightningModule.on_train_start = lambda module: threads.append(torch.get_num_threads())  # before the command restores them
assert main(sys.argv[1:]) == 0
print(threads[0])
"""


def _faults_after(script: str, *arguments: object, **environment: str) -> tuple[int, int]:
    """What a script prints last, and the page faults of 64 MiB used again after it, in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name not in (*machine._ALLOCATOR_VARIABLES, "OMP_NUM_THREADS")}
    words = ["-c", f"LIGHT_START = True\n{script}{_FAULTS}", *map(str, arguments)]
    if "torch" in script:
        done = warm.run(words, env={**inherited, **environment}, timeout=120)
    else:  # which Python by itself loads in no time
        environment = {**inherited, **environment}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    last, faults = done.stdout.split()[-2:]
    return int(last), int(faults)


_of_glibc = pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="the setting is glibc's"
)


@_of_glibc
def test_freed_memory_is_used_again_without_page_faults():
    kept, faults = _faults_after(_SETTING, "keep")
    assert kept == 1 and faults < 100
    assert _faults_after(_SETTING, "leave")[1] > 1000 or _huge_pages()
    assert _faults_after(_SETTING, "keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == 0  # the user's own setting is left alone


@_of_glibc
def test_a_command_trains_with_the_threads_and_the_allocator_that_its_options_name(tmp_path):
    run = f"--dataset SAMPLE --size 8 --max-steps 1 --no-validation --precision 32 --output-dir {tmp_path}/out".split()
    threads, faults = _faults_after(_COMMAND, *run, "--threads", 3)
    assert threads == 3 and faults < 100
    threads, faults = _faults_after(_COMMAND, *run, "--no-allocator-setting")
    assert threads == machine.usable_cores() and (faults > 1000 or _huge_pages())


def _huge_pages() -> bool:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.exists() and "[always]" in path.read_text()


def test_threads_follow_the_option_then_the_environment_then_the_cores(monkeypatch):
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert machine.set_threads(3) == 3 and os.environ["OMP_NUM_THREADS"] == "3"
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert machine.set_threads() == 3  # torch has read the variable by itself: nothing is set
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert machine.set_threads() == machine.usable_cores()
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert machine.set_threads(processes=machine.usable_cores()) == 1
        with pytest.raises(ValueError, match="at least 1, not 0"):
            machine.set_threads(0)
    finally:
        torch.set_num_threads(before)


def test_precision_names_are_settled_or_refused_by_name():
    assert precision.resolve("32", accelerator="cpu") == precision.resolve("32.32", accelerator="cpu") == "32.32"
    assert precision.resolve("auto", accelerator="cpu") in ("16.32", "32.32")
    assert precision.lightning_precision("16.32") == "bf16-mixed" and precision.name_and_type("bf16-mixed") == ("16.32", "bf16")
    assert precision.name_and_type("64-true") == (None, None)
    with pytest.raises(ValueError, match="unknown precision '8.8'; known are"):
        precision.resolve("8.8", accelerator="cpu")


_SPINNING = """
import os, sys
from lightning_ipu.command import cli
from lightning_ipu.command.parser import build_parser
print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
sys.modules["lightning_ipu.command.run"] = sys  # it need not be loaded
def start(words, given):
    print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
    return 0
parser = build_parser(prog="x", description="", epilog="", options=(), version=str)
cli.main(["fit"], parser=parser, options=(), settle=list, start=start, folder=None)
"""


@pytest.mark.parametrize(
    ("users", "after"), [({}, "1000 None"), ({"GOMP_SPINCOUNT": "7"}, "7 None"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None ACTIVE")]
)
def test_a_command_bounds_how_long_threads_spin_before_torch_is_there_unless_the_user_says_how_they_wait(users, after):
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    words = [sys.executable, "-c", "LIGHT_START = True\n" + _SPINNING]
    done = subprocess.run(words, env={**inherited, **users}, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [f"{users.get('GOMP_SPINCOUNT')} False", after]
