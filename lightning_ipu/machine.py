"""What a command settles before its first big allocation: its rank, cores, memory, and how the big libraries are loaded.

None of them is part of the plan: they change the speed and at most the last bit of a sum. Each gives way to what the user set in
the environment. Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_ipu.errors import UserError

LAUNCHED_BY_VARIABLE = "LIGHTNING_IPU_LAUNCHED_BY"
MOST_THREADS = 1024  # of one operation
GRACE = 10.0  # seconds in which the first process, or one that lost another, may still say what happened, before the others are ended
LAUNCHED_BY = int(os.environ.pop(LAUNCHED_BY_VARIABLE, "0"))  # taken out at once: what this process itself may start is not rank 0's

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # glibc's malloc.h
_LARGEST_INT = 2**31 - 1
_WAITING_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
TURNS_OF_SPINNING = 1000
_ALLOCATOR_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES", "LD_PRELOAD")


_GIVEN_BY = {  # numbers that a launcher gives to each process that it starts
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
}


def launcher() -> str | None:
    """The launcher that started this process as one of several, "torchrun" or "srun"; None if neither did.

    If only some of its variables are set, they are left over from another run or set by an allocation.
    """
    for name, variables in _GIVEN_BY.items():
        numbered = all(os.environ.get(variable, "").isdigit() for variable in variables)
        if numbered and (name == "srun" or os.environ.get("TORCHELASTIC_RUN_ID")):
            return name
    return None


def is_launched() -> bool:
    """Whether a launcher, ours included, started this process as one of several."""
    return bool(LAUNCHED_BY) or launcher() is not None


def started_rank() -> int:
    """This process's number among those that a launcher started: ours, torchrun or srun; 0 where none did."""
    if LAUNCHED_BY and os.environ.get("LOCAL_RANK", "").isdigit():
        return int(os.environ["LOCAL_RANK"])
    variable = {"torchrun": "RANK", "srun": "SLURM_PROCID", None: ""}[launcher()]
    return int(os.environ.get(variable, "0"))


def forget_leftovers() -> None:
    """Remove variables from the environment by which Lightning or torch would detect a launcher that did not start this process.

    Raises:
        UserError: a launcher started it in a way that is not supported; the message names its variable.
    """
    started_by = launcher()
    if started_by is None:
        for variable in [name for name in os.environ if name.startswith("TORCHELASTIC_") or name == "SLURM_NTASKS"]:
            del os.environ[variable]
    elif started_by == "srun" and (tasks := int(os.environ["SLURM_NTASKS"])) > 1 and "SLURM_NTASKS_PER_NODE" not in os.environ:
        raise UserError(f"SLURM_NTASKS={tasks}: the number of tasks per node is missing; for one node give srun --ntasks-per-node={tasks}")
    if started_by is None and "JSM_NAMESPACE_SIZE" in os.environ:
        if (size := os.environ.pop("JSM_NAMESPACE_SIZE")) != "1" and "JSM_NAMESPACE_RANK" in os.environ:
            raise UserError(f"JSM_NAMESPACE_SIZE={size}: processes are started by torchrun, srun or --processes, not by jsrun; unset it")


def usable_cores(*, root: str | Path = "/") -> int:
    """Physical cores that this process may keep busy: the affinity mask, hyper-threads counted once, within the cgroup's quota.

    ``root`` is the directory that holds ``proc`` and ``sys``. At least 1.
    """
    root = Path(root)
    cores, quota = len(_cores(root)), _cgroup_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def check_processes(number: int, name: str) -> None:
    """Raise UserError, with the option's name, for more processes than should run on this machine: 64, or 8 for each of its CPUs if more."""
    most = max(64, 8 * (os.cpu_count() or 1))
    if number > most:
        raise UserError(f"{name}={number} is too many processes for this machine; at most {most} are started")


def share_of_cores(place: int, processes: int, *, root: str | Path = "/") -> list[set[int]]:
    """The cores of the ``place``-th of ``processes`` that share this machine's evenly, each as its logical CPUs; none where they do not suffice.

    The cores are those of the affinity mask, a socket's side by side; ``root`` as in :func:`usable_cores`.
    """
    cores = _cores(Path(root))
    if len(cores) < processes:
        return []
    return cores[place * len(cores) // processes : (place + 1) * len(cores) // processes]


@contextmanager
def own_cores(place: int, processes: int, *, threads: int) -> Iterator[None]:
    """Bind all threads of this process, and those that they start, to a share of this machine's cores, as MPI's launchers do.

    Otherwise two processes with one thread each on two cores end up on the same core again and again, where a message's thread wakes.
    Does nothing for a single process, with fewer cores than processes or fewer in a share than ``threads``, if the launcher has bound this
    process already, and if the system does not allow it.
    """
    share = share_of_cores(place, processes)
    if processes == 1 or len(share) < threads or not hasattr(os, "sched_setaffinity") or _is_bound():
        yield
        return
    before = os.sched_getaffinity(0)
    _bind(before, set().union(*share))
    try:
        yield
    finally:
        _bind(set().union(*share), before)


def _bind(before: set[int], cpus: set[int]) -> None:
    """Move the threads of this process that may run on some CPUs to others."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # it has ended, or the system does not let us
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, cpus)


def _is_bound() -> bool:
    """Whether srun or torchrun, which can, has given this process cores of its own: other ones than the launcher itself has."""
    launched = launcher() is not None
    if not launched or not hasattr(os, "sched_getaffinity"):
        return False
    try:
        return os.sched_getaffinity(0) != os.sched_getaffinity(os.getppid())
    except OSError:
        return False


def _cores(root: Path) -> list[set[int]]:
    """The physical cores of the affinity mask, each as its logical CPUs; socket by socket."""
    logical = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[tuple[str, str], set[int]] = {}
    for number in sorted(logical):
        topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
        core = _read(topology / "physical_package_id"), _read(topology / "thread_siblings_list") or f"alone {number}"
        cores.setdefault(core, set()).add(number)
    return [cores[core] for core in sorted(cores, key=lambda core: (core[0].rjust(9), min(cores[core])))]


def set_threads(threads: int | None = None, *, processes: int = 1) -> int:
    """Give torch ``threads`` threads for one operation, here and in processes that this one starts; returns how many it uses.

    ``None`` leaves the number to ``OMP_NUM_THREADS`` where that is set. Otherwise it means an equal share of :func:`usable_cores` for each of
    ``processes`` on this machine, or all of them where srun has bound this process to its own cores. torch by itself ignores the cgroup's
    quota: a container with 2 of 64 cores would run 64 threads. Raises UserError for fewer than 1 and for more than `MOST_THREADS`.
    """
    import torch

    if threads is not None and threads < 1:
        raise UserError(f"threads must be at least 1, not {threads}")
    if threads is not None and threads > MOST_THREADS:
        raise UserError(f"threads={threads} must be at most {MOST_THREADS}")
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if threads is None and given.isdigit() and int(given) > MOST_THREADS:
        raise UserError(f"OMP_NUM_THREADS={given} in the environment must be at most {MOST_THREADS}")
    if threads is None and not given:
        threads = max(1, usable_cores() // (1 if _is_bound() else processes))
    if threads is not None:
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # Lightning, too, leaves the number alone where this is set
    return torch.get_num_threads()


def bound_spinning() -> None:
    """Let OpenMP's threads spin for `TURNS_OF_SPINNING` while they wait for one another, and then sleep; before torch is imported.

    By default libgomp's threads spin for milliseconds. Beside another program on the same cores, a spinning thread occupies the core that the
    thread it waits for needs, and training becomes five to ten times slower (benchmarks/busy.py). GOMP_SPINCOUNT and OMP_WAIT_POLICY in the
    environment take precedence. Processes that this one starts inherit the setting.
    """
    if not any(os.environ.get(name) for name in _WAITING_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(TURNS_OF_SPINNING)


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep big blocks instead of handing them back to the kernel; True if it now does.

    By itself glibc maps every block above 32 MiB afresh and touches each of its pages again, which costs 5 us per 4 KiB on a virtual
    machine: training CosmoFlow gains a factor 1.3 to 1.6, element-wise chains more. The price is that freed memory stays with the
    process. Other C libraries, and processes whose environment already steers the allocator, are left alone.
    """
    if any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - AttributeError on every other C library
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # Some releases cap the threshold at 32 MiB and refuse a larger one: there, mapping single blocks is switched off instead.
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_INT) or mallopt(_M_MMAP_MAX, 0)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))


def load(module: str) -> None:
    """Import a module with the garbage collector off, and exempt what was imported from later collections.

    torch and Lightning are a million objects that stay to the program's end. To look through them again and again takes 3 of the 8 s of
    CPU time of a short command, and a second at a time, later on, out of training.
    """
    if module not in sys.modules:
        collects = gc.isenabled()
        gc.disable()
        try:
            importlib.import_module(module)
        finally:
            gc.freeze()
            if collects:
                gc.enable()


def free_memory(*, root: str | Path = "/") -> int:
    """Free memory in bytes: what the system has available, within the control group's limits; 0 where neither is known.

    ``root`` as in :func:`usable_cores`. A control group's reclaimable file cache counts as free, as it does in the system's figure.
    """
    root = Path(root)
    free = []
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for version, group in _control_groups(root, "memory"):
        v1 = version == 1
        used, kept = _read(group / ("memory.usage_in_bytes" if v1 else "memory.current")), 0
        for line in _read(group / "memory.stat").splitlines():
            if line.startswith("total_inactive_file " if v1 else "inactive_file "):
                kept = int(line.split()[1])
        for name in ("memory.limit_in_bytes",) if v1 else ("memory.max", "memory.high"):
            if (limit := _read(group / name)).isdigit() and used.isdigit():
                free.append(int(limit) - int(used) + kept)
    return max(0, min(free, default=0))


def _cgroup_quota(root: Path) -> float | None:
    """Cores' worth of time that the control group grants (version 2 or 1, the tightest of all levels above), None without a limit."""
    quotas = []
    for version, group in _control_groups(root, "cpu"):
        if version == 1:
            quotas.append((_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")))
        else:
            quotas.append(_read(group / "cpu.max").partition(" ")[::2])
    limits = [int(quota) / int(period) for quota, period in quotas if quota.isdigit() and period.isdigit()]  # -1 or max is no limit
    return min(limits, default=None)


def _control_groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The control groups that this process is in for a controller, with their version: its own and all those above."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, mount = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controllers
            if not mount.is_dir():
                mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = mount / path.lstrip("/")
        # Inside a container the path may be the host's: then only the mount itself is there, and it is the container's own group.
        for level in (group, *group.parents):
            yield version, level
            if level == mount:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
