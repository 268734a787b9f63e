"""Names and numbers of stages are checked before anything runs; every refusal says what would be legal."""

import pytest
from runs import Net, blocks, classes, fit, loader
from torch import nn

from lightning_ipu.partition import check_num_stages, check_splits
from lightning_ipu.plan import PlanError


class TwoPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = blocks(depth=2)


@pytest.mark.parametrize("splits", [[], ["network.1"], ["network.0.1"], ["network.0.0.drop", "network.0.1.linear", "network.1"]], ids=str)
def test_submodules_in_their_order_begin_stages(splits):
    check_splits(TwoPart(), splits)


@pytest.mark.parametrize(
    ("splits", "parts"),
    [
        (["layer9"], ["'layer9'", "TwoPart", "network"]),
        (["network.0.7"], ["'network.0.7'", "network.0.1"]),
        ([""], ["''"]),
        (["network.1", "network.1"], ["'network.1'", "twice"]),
        (["network.1", "network.0.1"], ["'network.0.1'", "after", "order"]),
        (["network.0.1", "network.0.1.linear"], ["same place", "empty"]),
        (["network"], ["first stage would be empty"]),
        (["network.0.0"], ["first stage would be empty"]),
        (["network.0.0.linear"], ["first stage would be empty"]),
    ],
    ids=str,
)
def test_a_split_that_cannot_begin_a_stage_is_refused_with_what_would_be_right(splits, parts):
    with pytest.raises(PlanError) as refusal:
        check_splits(TwoPart(), splits)
    assert "\n" not in str(refusal.value) and "pipeline_splits" in str(refusal.value)
    assert all(part in str(refusal.value) for part in parts), refusal.value


def test_more_stages_than_layers_with_parameters_are_refused():
    check_num_stages(TwoPart(), 3)
    with pytest.raises(PlanError, match=r"num_stages=4 is more than the 3 layers .* TwoPart"):
        check_num_stages(TwoPart(), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_splits": ["layer9"]}, "pipeline_splits='layer9'"),
        ({"num_stages": 9}, "num_stages=9"),
        ({"num_stages": 3, "pipeline_splits": ["network.1"]}, "num_stages=3 contradicts pipeline_splits"),
        ({"pipeline_schedule": "zigzag"}, "pipeline_schedule='zigzag' is unknown; legal are 1F1B"),
    ],
    ids=str,
)
def test_a_fit_refuses_wrong_stages_before_its_first_step(options, message):
    module = Net()
    with pytest.raises(PlanError, match=message):
        fit(module, loader(classes(8)), **options)
    assert not module.seen
