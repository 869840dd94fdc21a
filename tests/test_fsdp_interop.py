"""DTensors: the parameters of an FSDP2 model come in and go out again, bit by bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mfsdp_func as mf
from tests import fsdp_cases as cases
from tests.fsdp_cases import FULL, ROWS, WHOLE
from tests.spawn import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning")]


class Model(nn.Module):
    """Tied, with rows that no number of ranks divides, experts, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(2)])
        self.experts = nn.Parameter(torch.randn(3, 6, 2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) + torch.einsum("bti,eio->bteo", x, self.experts).mean()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def round_trip(rank: int, shape: tuple[int, ...], kind: str) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    names = [name for name, _ in model().named_parameters()]
    owners = {name: n % mesh.size() for n, name in enumerate(names)}
    shard = WHOLE if kind == "owners" else ROWS
    placements = [FULL] * (len(shape) - 1) + [FULL if kind == "replicas" else shard]
    if both := kind.startswith("both"):
        placements, kind = [ROWS] * len(shape), kind.removeprefix("both ")
    context = mf.FsdpContext(
        parameter_to_owner=owners if kind == "owners" else None,
        shard_layout=mf.ShardLayout(kind) if kind in ("padded", "unpadded", "balanced") else mf.ShardLayout.PADDED,
        finer_rows=frozenset({"experts"} if kind == "unpadded" else ()),
    )
    roles = mf.Placements(tuple(range(len(shape))), placements, placements, placements)
    empty = model()
    for param in empty.parameters():
        param.data.fill_(-1)
    empty.blocks[1].requires_grad_(False)
    apply, start = mf.fully_shard(empty, mesh, roles, context=context)

    sharded, words, whole = model(), torch.arange(8).view(2, 4), model()
    for block in sharded.blocks:
        fsdp2(block, mesh=mesh)
    fsdp2(sharded, mesh=mesh)
    by_hand = {"replicas": [Replicate()]}.get(kind) or ([Shard(0)] * len(shape) if both else None)
    if by_hand:
        dtensors: dict[str, Any] = {n: distribute_tensor(p, mesh, by_hand) for n, p in whole.named_parameters()}
    else:
        dtensors = dict(sharded.named_parameters())
    with pytest.raises(TypeError, match=r"sharded by torch\.distributed\.fsdp already.*from_dtensors"):
        mf.fully_shard(sharded, mesh, roles)

    params = apply.from_dtensors(dtensors)
    assert set(params) == set(start)
    for name, value in apply.gather_parameters(params).items():
        assert torch.equal(value, whole.get_parameter(name)), name
    back = apply.to_dtensors(params)
    assert set(back) == {*names, "head.weight"}
    for name, tensor in dtensors.items():
        assert isinstance(back[name], DTensor)
        assert back[name].device_mesh == mesh
        assert back[name].placements == tensor.placements
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name].to_local(), tensor.to_local()), name
        assert torch.equal(back[name].full_tensor(), whole.get_parameter(name)), name
    again = apply.from_dtensors(back)
    cases.assert_same_buffers(again, params, rtol=0, atol=0)

    # Into a model that is sharded by FSDP2, which then gives the same.
    half = cases.scaled(params, 0.5)
    loaded = apply.to_dtensors(half)
    expected = apply(half, words)
    if not by_hand:
        for load in (sharded.load_state_dict, lambda state: set_model_state_dict(sharded, state)):
            torch.nn.Module.load_state_dict(sharded, {n: t * 0 for n, t in get_model_state_dict(sharded).items()})
            load(loaded)
            torch.testing.assert_close(sharded(words), expected, rtol=0, atol=0)
        sharded.load_state_dict(apply.to_dtensors(params))

    # DTensor parameters of a module that can be copied.
    plain = copy.deepcopy(whole)
    for name, tensor in dtensors.items():
        owner, _, leaf = name.rpartition(".")
        plain.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor.detach()))
    plain.head.weight = plain.words.weight
    other, values = mf.fully_shard(plain, mesh, roles, context=context)
    for name, value in other.gather_parameters(values).items():
        assert torch.equal(value, whole.get_parameter(name)), name


@pytest.mark.parametrize("kind", ["padded", "unpadded", "balanced", "owners", "replicas"])
def test_round_trip_on_two(kind: str, ranks2: RankPool) -> None:
    ranks2.run(round_trip, (2,), kind)


ON_FOUR = [
    (4, "padded"),
    (4, "unpadded"),
    (4, "owners"),
    ("2x2", "balanced"),
    ("2x2", "both padded"),
    ("2x2", "both balanced"),
]


@pytest.mark.parametrize(("shape", "kind"), ON_FOUR)
def test_round_trip_on_four(shape: int | str, kind: str, ranks4: RankPool) -> None:
    ranks4.run(round_trip, (4,) if shape == 4 else (2, 2), kind)


def refuse(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    module = cases.net()
    apply, params = mf.fully_shard(module, mesh, mf.Placements(0, [ROWS], [ROWS], [ROWS]))
    good = apply.to_dtensors(params)
    scale = good["blocks.0.scale"]
    assert scale.shape == ()
    assert scale.placements == (Replicate(),)
    assert float(scale.to_local()) == pytest.approx(1.3)
    cases.assert_same_buffers(apply.from_dtensors(good), params, rtol=0, atol=0)
    replicated = distribute_tensor(module.positions.detach(), mesh, [Replicate()])
    for name, wrong, error, message in (
        ("positions", module.positions.detach(), TypeError, "is a Tensor, expected a DTensor"),
        ("positions", good["norm.weight"], ValueError, r"has shape \(6,\), expected \(5, 6\)"),
        ("positions", good["positions"].float(), TypeError, r"is torch\.float32, expected torch\.float64"),
        ("positions", replicated, ValueError, r"is placed as .*call its redistribute first"),
        ("position", good["positions"], ValueError, "'position' is no parameter of the module"),
    ):
        with pytest.raises(error, match=message):
            apply.from_dtensors(good | {name: wrong})
    with pytest.raises(ValueError, match="no tensor for parameter 'positions'"):
        apply.from_dtensors({name: tensor for name, tensor in good.items() if name != "positions"})
    grid = init_device_mesh("cpu", (1, world_size))
    other = distribute_tensor(module.positions.detach(), grid, [Replicate(), Shard(0)])
    with pytest.raises(ValueError, match="expected the ranks of"):
        apply.from_dtensors(good | {"positions": other})


def test_what_does_not_fit_is_refused(ranks2: RankPool) -> None:
    ranks2.run(refuse, 2)
