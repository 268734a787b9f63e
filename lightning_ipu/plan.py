"""The plan: the five numbers that decide what a training run computes, their checks and the arithmetic on them."""

from dataclasses import dataclass, fields

from lightning_ipu.errors import UserError


class PlanError(UserError):
    """A plan, or a run under a plan, that cannot be carried out; the message names the option, its value and what would be right."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run computes, whatever it runs on.

    Args:
        micro_batch_size: samples that go through the network at once on one replica.
        gradient_accumulation_factor: micro-batches per replica and weight update (A).
        replication_factor: copies of the network whose gradients are averaged (R).
        num_stages: slices of the network in a pipeline (S).
        device_iterations: weight updates per host step, an upper bound (D).

    Raises:
        PlanError: a number that is not a whole number of at least 1.
    """

    micro_batch_size: int = 1
    gradient_accumulation_factor: int = 1
    replication_factor: int = 1
    num_stages: int = 1
    device_iterations: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"{field.name}={value!r} must be a whole number of at least 1")

    @property
    def num_ipus(self) -> int:
        """Virtual IPUs: one per stage and replica."""
        return self.replication_factor * self.num_stages

    @property
    def micro_batches_per_update(self) -> int:
        """Micro-batches whose gradients make one weight update, over all replicas."""
        return self.gradient_accumulation_factor * self.replication_factor

    @property
    def samples_per_update(self) -> int:
        """The global batch."""
        return self.micro_batch_size * self.micro_batches_per_update

    @property
    def samples_per_host_step(self) -> int:
        """Samples between two returns to the host, at most."""
        return self.samples_per_update * self.device_iterations

    def updates_in(self, samples: int) -> int:
        """Whole weight updates that an epoch of so many samples holds."""
        return samples // self.samples_per_update

    def left_out(self, samples: int) -> int:
        """Samples that an epoch of so many samples has over after its whole weight updates."""
        return samples % self.samples_per_update

    def factors(self) -> str:
        """The global batch spelled out, for messages."""
        return (
            f"micro-batch {self.micro_batch_size} x gradient_accumulation_factor {self.gradient_accumulation_factor}"
            f" x replication_factor {self.replication_factor} = {self.samples_per_update} samples"
        )
