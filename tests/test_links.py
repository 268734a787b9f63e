"""Tensors go from stage to stage as they are, in one message with the number of their kind or behind it."""

import pickle
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from lightning_ipu.engine.kinds import Wire
from lightning_ipu.engine.links import Links

SHAPES = [(64, 3), (5,), (512, 1024)]  # of three kinds: the last are too large to be packed
CALLS = [0, 0, 1, 2, 2, 0, 1, 1, 2, 0]


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def test_tensors_of_any_type_and_layout_are_packed_as_they_are():
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    values = [images, torch.tensor(True), torch.randn(7, dtype=torch.complex64), torch.empty(0, 3).half(), torch.randn(9).bfloat16()]
    wire = Wire([meta(value) for value in values], may_pack=True)
    message = wire.pack(5, wire.laid_out(values))
    assert len(message) == len(wire.pack_alone(3)) == wire.size
    for value, restored in zip(values, wire.restored(wire.unpack(message)), strict=True):
        assert torch.equal(restored, value) and restored.dtype == value.dtype and restored.stride() == value.stride()
        assert restored.data_ptr() % 64 == 0 or not value.numel()  # sums may depend on it


class Cut:
    """Kinds of calls, numbered as they come, each of one tensor."""

    def __init__(self) -> None:
        self.slices, self.latest = [], None
        self.add(SHAPES[0])

    def add(self, shape: tuple[int, ...]) -> None:
        wire = Wire([torch.empty(shape, device="meta")], may_pack=True)
        self.slices.append(SimpleNamespace(number=len(self.slices), arriving=wire, leaving=wire))
        self.latest = self.slices[-1]

    def cut(self, kind: int | bytes) -> SimpleNamespace:
        if isinstance(kind, bytes):
            self.add(pickle.loads(kind))
        else:
            self.latest = self.slices[kind]
        return self.latest


def stage(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3, timeout=timedelta(seconds=60))
    processes = SimpleNamespace(
        part=rank, parts=3, is_last=rank == 2, device=torch.device("cpu"), peer=int, pipeline_groups=lambda: (dist.group.WORLD,) * 3
    )
    links, kinds, arrived = Links(processes), Cut(), []
    for number, call in enumerate(CALLS):
        if rank == 0:
            before, values = kinds.latest, [torch.full(SHAPES[call], float(number))]
            kind = pickle.dumps(SHAPES[call]) if call == len(kinds.slices) else call
            links.announce(before, kind)
            piece = kinds.cut(kind)
        else:
            before, piece, values = links.receive(kinds)
            arrived.append((values[0].shape, values[0].unique().item()))
        if rank < 2:
            links.send(before, piece, values)
    links.finish()
    torch.save(arrived, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("place", [1, 2], ids=["middle", "last"])
def test_each_process_hears_of_every_kind_before_its_data(place, sent):
    assert torch.load(f"{sent}/{place}.pt", weights_only=False) == [(SHAPES[call], number) for number, call in enumerate(CALLS)]


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("links")
    context = torch.multiprocessing.start_processes(stage, (str(folder),), nprocs=3, join=False, start_method="fork")
    assert any(context.join(timeout=30) for _ in range(3))  # each waits for one more to end
    return folder
