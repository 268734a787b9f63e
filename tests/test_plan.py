"""The plan: its arithmetic, and what it refuses."""

from dataclasses import FrozenInstanceError, replace

import pytest

from lightning_ipu.plan import Plan, PlanError

PLAN = Plan(micro_batch_size=16, gradient_accumulation_factor=128, replication_factor=4, num_stages=4, device_iterations=2)


def test_the_arithmetic_is_that_of_the_words():
    assert PLAN.num_ipus == 16
    assert PLAN.micro_batches_per_update == 512
    assert PLAN.samples_per_update == 8192
    assert PLAN.samples_per_host_step == 16384
    assert Plan() == Plan(micro_batch_size=1, device_iterations=1) and Plan().samples_per_host_step == Plan().num_ipus == 1


@pytest.mark.parametrize("samples", [0, 1, 8191, 8192, 8193, 16383, 1_281_167])
def test_an_epoch_is_whole_updates_and_what_is_left_out(samples):
    assert PLAN.updates_in(samples) * PLAN.samples_per_update + PLAN.left_out(samples) == samples
    assert 0 <= PLAN.left_out(samples) < PLAN.samples_per_update


@pytest.mark.parametrize("field", list(Plan.__dataclass_fields__))
@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "2", True, None])
def test_a_factor_that_is_no_whole_number_of_at_least_one_is_refused_by_name(field, value):
    with pytest.raises(PlanError, match=f"{field}={value!r}") as refusal:
        Plan(**{field: value})
    assert "\n" not in str(refusal.value) and isinstance(refusal.value, ValueError)


def test_factors_names_all_four_numbers_for_messages():
    text = replace(PLAN, device_iterations=1).factors()
    for part in ("micro-batch 16", "gradient_accumulation_factor 128", "replication_factor 4", "8192 samples"):
        assert part in text


def test_a_plan_cannot_change_and_takes_no_positional_numbers():
    with pytest.raises(FrozenInstanceError):
        PLAN.num_stages = 2
    with pytest.raises(TypeError):
        Plan(16)
