"""One group of two ranks for tests of faults, and what must still work after one."""

from collections.abc import Callable
from typing import Any

import torch

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout

Tensors = dict[int, torch.Tensor]
SHORT = 2.0
"""Seconds after which a group gives up, where a test waits for that."""


def assert_says(error: BaseException | str, *words: str) -> None:
    text = str(error)
    assert all(word in text for word in words), f"missing {[word for word in words if word not in text]} in: {text}"


# One group for all faults. Rank 0 owns both participating tensors; rank 1 holds the last row of tensor 0 and tensor 1.

LAYOUT = mf.GlobalLayout([(4, 2), (4, 2), (3,)], [0, 8, 16], 19, [0, 6])


def full(dtype: torch.dtype = torch.float32) -> Tensors:
    return {
        i: torch.arange(float(s.numel())).view(s).add(100 * i).to(dtype) for i, s in enumerate(LAYOUT.tensor_shapes)
    }


def block(
    mesh: Mesh, owners: dict[int, int] | None = None, name: str = "block", dtype: torch.dtype | None = torch.float32
) -> GroupOwnerLayout:
    return GroupOwnerLayout(mesh, LAYOUT, owners or {0: mesh.ranks[0], 1: mesh.ranks[0]}, name=name, dtype=dtype)


def shards(mesh: Mesh, dtype: torch.dtype = torch.float32) -> Tensors:
    tensors = full(dtype)
    first = {0: tensors[0].view(-1)[:6]}
    last = {0: tensors[0].view(-1)[6:], 1: tensors[1].view(-1), 2: tensors[2]}
    return first if mesh.rank == mesh.ranks[0] else last


def results(mesh: Mesh, dtype: torch.dtype = torch.float32) -> Tensors:
    return {i: full(dtype)[i] for i in (0, 1)} if mesh.rank == mesh.ranks[0] else {}


def check_round_trip(mesh: Mesh) -> str:
    gathered, token = mf.gather(shards(mesh), owner_layout=block(mesh))
    wanted = results(mesh)
    assert list(gathered) == list(wanted)
    assert all(torch.equal(gathered[i], wanted[i]) for i in wanted)
    parts, _ = mf.scatter(gathered, owner_layout=block(mesh), after=token)
    assert list(parts) == [i for i in shards(mesh) if i != 2]
    assert all(torch.equal(part.reshape(-1), shards(mesh)[i]) for i, part in parts.items())
    return "right"


def catch(function: Callable[..., Any], *args: Any, **keywords: Any) -> BaseException | None:
    try:
        function(*args, **keywords)
    except Exception as error:
        return error
    return None


def round_trip_on(rank: int) -> str:
    return check_round_trip(Mesh(2, rank=rank))
