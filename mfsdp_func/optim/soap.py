"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, kept and computed by the owners of tensors."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from mfsdp_func.optim.owned import owned
from mfsdp_func.optim.owners import Owners, map_on_owners, owned_shapes
from mfsdp_func.optim.transformation import (
    GradientTransformation,
    LearningRate,
    check_learning_rate,
    learning_rate_at,
)
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import shard_axes


class SoapState(NamedTuple):
    """State of `soap`. All but `step` is held by owners: of the tensors that this rank owns, by their keys."""

    step: torch.Tensor
    """Number of updates so far: 0-D, int64, on the CPU, so that the host knows it without waiting."""
    exp_avg: dict[Any, torch.Tensor]
    """Running mean of gradients, in the tensor's own basis and shape."""
    exp_avg_sq: dict[Any, torch.Tensor]
    """Running mean of squared gradients, in the eigenbasis."""
    statistics: dict[Any, tuple[torch.Tensor, ...]]
    """Shampoo's: for each dim, the running mean of ``G Gᵀ`` over all other dims; empty where a dim has none."""
    bases: dict[Any, tuple[torch.Tensor, ...]]
    """Their eigenvectors, as columns, by falling eigenvalues."""


def soap(
    learning_rate: LearningRate,
    *,
    owner_layout: Owners | None = None,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    correct_bias: bool = True,
    stagger: bool = True,
) -> GradientTransformation[SoapState]:
    """Adam in the eigenbasis of Shampoo's statistics, which is refreshed by one step of power iteration and QR.

    Source: N. Vyas, D. Morwani, R. Zhao, I. Shapira, D. Brandfonbrener, L. Janson, S. Kakade, "SOAP: Improving and
    Stabilizing Shampoo using Adam", arXiv 2409.11321, 2024, and the authors' implementation, whose numbers these are with
    ``stagger=False``: the first update only starts the statistics, the basis of an update is that of the one before it,
    decay follows the step. Where the first gradient leaves a statistic short of full rank (it is more than square), the
    authors' basis of the rest is what their eigensolver returns; here it is the same, by the same operations.

    With an `owner_layout`, tensors are shards as in `muon`: an owner gets the whole gradient, keeps all of that tensor's
    state, and sends back the direction. Not inside compiled regions: a refresh is decided on the host.

    Args:
        learning_rate: see `LearningRate`.
        owner_layout: who computes what, see `Owners`; None where tensors are whole.
        betas: how much of the running means of gradients and of their squares an update keeps.
        shampoo_beta: how much of the statistics an update keeps; by default ``betas[1]``.
        eps: added to the denominator.
        weight_decay: every update takes ``learning_rate * weight_decay`` of the parameter, as it then is, off it.
        precondition_frequency: number of updates from one refresh of a basis to the next.
        max_precond_dim: dims longer than this have no statistics. Nor have tensors of fewer than two dims.
        correct_bias: correct the running means for their start at zero.
        stagger: refresh the bases of an owner's tensors in different updates (see `soap_offsets`), so that none is much
            longer than the others.

    Raises:
        ValueError: on a number out of range.
        KeyError: in `update`, where a gradient is missing.

    >>> optimizer = soap(0.1)
    >>> params = {"w": torch.ones(2, 3)}
    >>> updates, state = optimizer.update(params, optimizer.init(params), params)
    >>> bool(updates["w"].any()), [tuple(basis.shape) for basis in state.bases["w"]]
    (False, [(2, 2), (3, 3)])
    """
    check_learning_rate("soap", learning_rate)
    kept = betas[1] if shampoo_beta is None else shampoo_beta
    if not all(0 <= beta < 1 for beta in (*betas, kept)):
        raise ValueError(f"soap: betas and shampoo_beta must lie in [0, 1), got {betas} and {kept}")
    if eps < 0 or weight_decay < 0 or precondition_frequency < 1:
        raise ValueError(
            "soap: eps and weight_decay must not be negative, precondition_frequency be at least 1, got"
            f" {eps}, {weight_decay} and {precondition_frequency}"
        )
    taking_part = None if owner_layout is None else owned_shapes(owner_layout)

    def offsets_of(params: Mapping[Any, torch.Tensor]) -> dict[Any, int]:
        if not stagger:
            return {}
        given: Any = {key: param.shape for key, param in params.items()} if owner_layout is None else owner_layout
        return soap_offsets(given, precondition_frequency, max_precond_dim=max_precond_dim)

    def init(params: Mapping[Any, torch.Tensor]) -> SoapState:
        device = next((param.device for param in params.values()), None)
        mine = params if owner_layout is None else owned(params, owner_layout)
        zeros = {key: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for key, tensor in mine.items()}
        statistics = {key: tuple(_squares(zero, max_precond_dim)) for key, zero in zeros.items()}
        bases = {key: tuple(map(torch.zeros_like, squares)) for key, squares in statistics.items()}
        other = {key: zero.clone() for key, zero in zeros.items()}
        return SoapState(torch.zeros((), dtype=torch.int64), zeros, other, statistics, bases)

    def one(key: Any, grad: torch.Tensor, state: SoapState, offset: int) -> tuple[torch.Tensor, list[Any]]:
        """One tensor: its direction, and its new state."""
        step, mean, square = int(state.step), state.exp_avg[key], state.exp_avg_sq[key]
        squares, bases = state.statistics[key], state.bases[key]
        direction, grad = torch.zeros_like(grad), grad.to(mean.dtype)
        if step:
            mean = torch.lerp(mean, grad, 1 - betas[0])
            square = torch.lerp(square, _project(grad, bases).square(), 1 - betas[1])
            direction = _project(_project(mean, bases) / (square.sqrt() + eps), bases, back=True)
        squares = tuple(
            [torch.lerp(old, _outer(grad, dim), 1 - kept) if old.numel() else old for dim, old in enumerate(squares)]
        )
        if not step:
            bases = tuple([_eigenbasis(matrix) if matrix.numel() else matrix for matrix in squares])
        elif not (step + offset) % precondition_frequency:
            bases, square = _refreshed(squares, bases, square)
        return direction, [mean, square, squares, bases]

    def update(
        grads: Mapping[Any, torch.Tensor], state: SoapState, params: Mapping[Any, torch.Tensor]
    ) -> tuple[dict[Any, torch.Tensor], SoapState]:
        own = {key: param for key, param in params.items() if taking_part is None or key in taking_part}
        if missing := [key for key in own if key not in grads]:
            raise KeyError(f"soap: no gradient of tensor {missing[0]!r} ({len(missing)} missing in all)")
        offsets, new = offsets_of(own), dict[Any, list[Any]]()

        def on_owner(whole: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
            directions: dict[Any, torch.Tensor] = {}
            for key, grad in whole.items():
                directions[key], new[key] = one(key, grad, state, offsets.get(key, 0))
            return directions

        given = {key: grads[key].to(param.dtype) for key, param in own.items()}
        if owner_layout is None:
            directions = on_owner(given)
        else:
            shards = {key: shard for key, shard in given.items() if shard.numel()}
            dtype = next((shard.dtype for shard in given.values()), None)
            directions, _ = map_on_owners(on_owner, shards, owner_layout=owner_layout, dtype=dtype)
        step, rate = int(state.step), learning_rate_at(learning_rate, state.step)
        scale = rate if step else 0.0
        if step and correct_bias:
            scale = rate * (math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step))
        decay = rate * weight_decay if step else 0.0
        updates: dict[Any, torch.Tensor] = {}
        for key, param in own.items():
            # A rank's empty shard takes no part in the exchange.
            change = scale * directions[key].reshape(param.shape) if key in directions else torch.zeros_like(param)
            updates[key] = (-change - decay * (param - change)).to(param.dtype)
        fields = [{key: new[key][n] for key in state.exp_avg} for n in range(4)]
        return updates, SoapState(state.step + 1, *fields)

    return GradientTransformation(init, update, whole=owner_layout is None)


def soap_offsets(
    owner_layout_or_shapes: Owners | Mapping[Any, Iterable[int]],
    precondition_frequency: int,
    *,
    max_precond_dim: int = 10000,
) -> dict[Any, int]:
    """By how many updates each tensor's refreshes come early, so that each owner's work is spread evenly.

    A tensor with offset ``o`` refreshes its basis in the updates ``n`` with ``(n + o) % precondition_frequency == 0``. The
    tensors of an owner, the costliest first, each go where the least work is; the cost is that of QR, the sum of ``m³``
    over the dims. The same on every rank.

    >>> soap_offsets({"a": (4, 4), "b": (4, 4), "c": (2, 2), "d": (2, 2)}, 2)
    {'a': 0, 'b': 1, 'c': 0, 'd': 1}
    """
    given = owner_layout_or_shapes
    machines: dict[Any, list[tuple[Any, tuple[int, ...]]]] = {}
    if isinstance(given, GroupOwnerLayout):
        _by_owner(None, given, machines)
    else:
        for name, value in given.items():
            if isinstance(value, GroupOwnerLayout):
                _by_owner(name, value, machines)
            else:
                machines.setdefault(None, []).append((name, tuple(value)))
    offsets: dict[Any, int] = {}
    for tensors in machines.values():
        load = [0] * precondition_frequency
        costs = [sum(size**3 for size in shape if size <= max_precond_dim) for _, shape in tensors]
        for n in sorted(range(len(tensors)), key=lambda n: -costs[n]):
            offset = min(range(precondition_frequency), key=load.__getitem__)
            load[offset] += costs[n]
            offsets[tensors[n][0]] = offset
    return offsets


def _by_owner(name: Any, owners: GroupOwnerLayout, machines: dict[Any, list[tuple[Any, tuple[int, ...]]]]) -> None:
    axes = shard_axes(owners.placements)
    for i, owner in owners.tensor_to_owner.items():
        place = owners.mesh.shard_index(axes, owner)
        key = i if name is None else (name, i)
        machines.setdefault(place, []).append((key, tuple(owners.layout.tensor_shapes[i])))


def _squares(like: torch.Tensor, max_precond_dim: int) -> list[torch.Tensor]:
    sizes = [size if like.dim() > 1 and size <= max_precond_dim else 0 for size in like.shape]
    return [like.new_zeros(size, size) for size in sizes]


def _outer(grad: torch.Tensor, dim: int) -> torch.Tensor:
    """``G Gᵀ`` with `dim` as the rows."""
    others = [other for other in range(grad.dim()) if other != dim]
    return torch.tensordot(grad, grad, dims=[others, others])  # pyright: ignore[reportArgumentType]


def _project(tensor: torch.Tensor, bases: tuple[torch.Tensor, ...], *, back: bool = False) -> torch.Tensor:
    """Every dim into its basis, or back; each is brought last in turn, so that all end where they were."""
    for basis in bases:
        into = [[0], [1 if back else 0]]
        turned = torch.tensordot(tensor, basis, dims=into) if basis.numel() else tensor.movedim(0, -1)  # pyright: ignore[reportArgumentType]
        tensor = turned
    return tensor


def _eigenbasis(matrix: torch.Tensor) -> torch.Tensor:
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    wide = wide + 1e-30 * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    return torch.linalg.eigh(wide)[1].flip(1).to(matrix.dtype)


def _refreshed(
    squares: tuple[torch.Tensor, ...], bases: tuple[torch.Tensor, ...], square: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """One step of power iteration with QR, vectors sorted by what they now say of the eigenvalues; the squares follow."""
    found: list[torch.Tensor] = []
    for dim, (matrix, basis) in enumerate(zip(squares, bases, strict=True)):
        if not matrix.numel():
            found.append(basis)
            continue
        wide = torch.promote_types(matrix.dtype, torch.float32)
        matrix, old = matrix.to(wide), basis.to(wide)
        order = torch.diag(old.mT @ matrix @ old).argsort(descending=True)
        square = square.index_select(dim, order)
        found.append(torch.linalg.qr(matrix @ old[:, order])[0].to(basis.dtype))
    return tuple(found), square
