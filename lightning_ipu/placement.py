"""The placement: which virtual IPU (one stage of one replica) lives in which process."""

from dataclasses import dataclass

from lightning_ipu.plan import Plan, PlanError


def legal_process_counts(plan: Plan) -> list[int]:
    """Numbers of processes that can serve the plan's R x S virtual IPUs.

    W processes do when W divides R (each holds whole replicas), or when W = R x k with k dividing S (each replica is spread over k processes).
    """
    whole = {w for w in range(1, plan.replication_factor + 1) if plan.replication_factor % w == 0}
    spread = {plan.replication_factor * k for k in range(1, plan.num_stages + 1) if plan.num_stages % k == 0}
    return sorted(whole | spread)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Replicas and stages of every process, numbered replica by replica: process p = group of replicas x processes per replica + part.

    Raises:
        PlanError: a number of processes that cannot serve the plan; the message lists the ones that can.
    """

    plan: Plan
    processes: int = 1

    def __post_init__(self) -> None:
        legal = legal_process_counts(self.plan)
        if self.processes not in legal:
            raise PlanError(
                f"{self.processes} processes cannot serve {self.plan.replication_factor} replicas x {self.plan.num_stages} stages;"
                f" legal numbers of processes are {', '.join(map(str, legal))}"
            )

    @property
    def processes_per_replica(self) -> int:
        """1 where a process holds whole replicas, else the parts that a replica's stages are spread over."""
        return max(1, self.processes // self.plan.replication_factor)

    def replicas_of(self, process: int) -> range:
        """Replicas that live, wholly or in part, in this process, in the order in which they run."""
        groups = self.processes // self.processes_per_replica
        held = self.plan.replication_factor // groups
        group = process // self.processes_per_replica
        return range(group * held, (group + 1) * held)

    def stages_of(self, process: int) -> range:
        """Stages that live in this process; stages that share one run as one."""
        held = self.plan.num_stages // self.processes_per_replica
        part = process % self.processes_per_replica
        return range(part * held, (part + 1) * held)
