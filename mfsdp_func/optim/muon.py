"""Muon on whole matrices or on row shards: momentum where the rows are, Newton-Schulz where the owner is."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from mfsdp_func.operations.views import buffers_in
from mfsdp_func.optim.adamw import mixed
from mfsdp_func.optim.block_work import AdjustLr, AnyBlocks, BlockWork, ratio_fn
from mfsdp_func.optim.chains import add_decayed_weights, counted_chain, on_tensors, scale_by_learning_rate
from mfsdp_func.optim.facts import Needs, Where
from mfsdp_func.optim.host_count import HostCount
from mfsdp_func.optim.newton_schulz import COEFFICIENTS, EPS, newton_schulz
from mfsdp_func.optim.orthogonal import Orthogonalize
from mfsdp_func.optim.owners import Owners
from mfsdp_func.optim.transformation import GradientTransformation, LearningRate, first_step


class MuonState(NamedTuple):
    """State of `muon`."""

    step: torch.Tensor
    """Number of updates so far: 0-D, int64."""
    momentum: dict[Any, torch.Tensor]
    """Running mean of gradients: per tensor (or shard) that takes part, the shape and dtype of the parameter."""
    row_squares: dict[Any, torch.Tensor] | tuple[()] = ()
    """With `row_beta`, for each piece of a parameter that this rank owns: running means of the squares in each row of its
    matrices, 1-D. Keys are ``(index, number of the piece)``, after the name of a group.
    """
    since_exchange: HostCount | tuple[()] = ()
    """With a `period`: number of updates since the last full one, itself included; the host knows it."""


def muon(
    learning_rate: LearningRate,
    *,
    owner_layout: Owners | None = None,
    momentum: float | torch.Tensor = 0.95,
    nesterov: bool = True,
    weight_decay: float | torch.Tensor = 0.0,
    adjust_lr_fn: AdjustLr = "original",
    ns_steps: int = 5,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    ns_dtype: torch.dtype | None = None,
    eps: float = EPS,
    orthogonalize: Orthogonalize | None = None,
    blocks: AnyBlocks = None,
    batch_of_matrices: bool = False,
    stack_equal_shapes: bool = True,
    period: int = 1,
    local_scale: float | torch.Tensor = 1.0,
    row_beta: float | torch.Tensor | None = None,
) -> GradientTransformation[MuonState]:
    """Momentum, orthogonalised: the numbers of `torch.optim.Muon` (which has ``ns_dtype=torch.bfloat16``).

    The chain of `scale_by_muon`, `add_decayed_weights` and `scale_by_learning_rate`.

    With an `owner_layout`, parameters, gradients, momentum and updates are dicts, tensor index -> this rank's shard, in
    any shape, of every participating tensor that this rank holds. Every rank of the mesh calls `update`: momentum on
    the shards, `gather`, Newton-Schulz on the owners, `scatter`, and the rest on the shards again. The two exchanges
    travel in `ns_dtype`, which changes no bit of the result: Newton-Schulz begins by converting to it. Without an
    `owner_layout`, the dicts hold whole tensors under any keys, and nothing moves. Both give the same bits with
    ``stack_equal_shapes=False``.

    With owner layouts of several groups by name (blocks of a model, whose buffers are their own), keys are pairs
    ``(name, tensor index)``: all groups move in one exchange each way, and equal shapes of all of them are stacked. They
    share one dtype; else give `ns_dtype`, in which everything travels. A dict of the groups' `DBuffer`s, such as
    `fully_shard` returns, serves as parameters and gradients too, if all of its tensors take part (see `partition`).

    Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; J. Liu et al., "Muon is
    Scalable for LLM Training", 2025 ("match_rms_adamw"). With a `period`: A. Khaled et al., "MuonBP: Faster Muon via
    Block-Periodic Orthogonalization", arXiv 2510.16981, 2025. With `row_beta`: NorMuon, see `normalize_rows`.

    Args:
        learning_rate: see `LearningRate`.
        owner_layout: who orthogonalises what, see `Owners`; None where tensors are whole.
        momentum: how much of the running mean of gradients an update keeps.
        nesterov: whether the gradient is mixed once more into its running mean.
        weight_decay: every update takes ``learning_rate * weight_decay`` of the parameter off it.
        adjust_lr_fn: what the learning rate is multiplied with, for an m x n matrix as the block spec writes it; see
            `AdjustLr`.
        ns_steps: see `newton_schulz`.
        ns_coefficients: see `newton_schulz`.
        ns_dtype: dtype of Newton-Schulz; by default bfloat16 on CUDA, else that of the parameters. Where a rank owns a
            tensor but holds no shard at all, give it (on CUDA and in compiled regions).
        eps: see `newton_schulz`.
        orthogonalize: a function of matrices instead of `newton_schulz` (whose arguments above then say nothing but how
            shards travel, `ns_dtype`): `polar_express`, `gram`, a ``partial`` of `newton_schulz`.
        blocks: which parts of a tensor are matrices of their own; see `AnyBlocks` and `mfsdp_func.optim.blocks`. Those
            that are runs of memory get owners of their own, see `owners_of_blocks`; the others are computed by the owner
            of their tensor.
        batch_of_matrices: how a tensor of more than two dims is seen that no block spec is given for: as a batch of its
            last two dims (experts), or (False) as the one matrix ``(shape[0], shape[1:].numel())`` (convolutions).
        stack_equal_shapes: run Newton-Schulz once per shape, on the stacked matrices of an owner, which may change
            rounding; else on one matrix after the other.
        period: the first of so many updates is as above; in the others every rank orthogonalises what it holds of each
            block as a matrix of its own (scaled by its own shape), and nothing moves. Shards must then end between rows
            of blocks. The host counts, alike on all ranks, also updates that `apply_if_finite` skips; a compiled update
            has two graphs. Whole tensors have no such parts: each update is a full one.
        local_scale: what these other updates are multiplied with: the ratio of the two step sizes.
        row_beta: how much owners keep of the running mean of the squares of each row, by the root of which the row is
            then divided (0.95 is usual); None leaves rows as they are. Not together with a `period`.

    Raises:
        ValueError: on a tensor of less than two dims, an unknown `adjust_lr_fn`, a momentum or `row_beta` outside [0, 1],
            a negative learning rate or `weight_decay`, a `period` below 1, or one that shards do not allow.
        KeyError: in `update`, where the gradient of a tensor is missing.
    """
    usual = partial(newton_schulz, steps=ns_steps, coefficients=ns_coefficients, eps=eps, dtype=ns_dtype)
    return counted_chain(
        scale_by_muon(
            owner_layout=owner_layout,
            momentum=momentum,
            nesterov=nesterov,
            orthogonalize=orthogonalize or usual,
            adjust_lr_fn=adjust_lr_fn,
            ns_dtype=ns_dtype,
            blocks=blocks,
            batch_of_matrices=batch_of_matrices,
            stack_equal_shapes=stack_equal_shapes,
            period=period,
            local_scale=local_scale,
            row_beta=row_beta,
        ),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )


def scale_by_muon(
    *,
    owner_layout: Owners | None = None,
    momentum: float | torch.Tensor = 0.95,
    nesterov: bool = True,
    bias_correction: bool = False,
    orthogonalize: Orthogonalize = newton_schulz,
    adjust_lr_fn: AdjustLr = "original",
    ns_dtype: torch.dtype | None = None,
    blocks: AnyBlocks = None,
    batch_of_matrices: bool = False,
    stack_equal_shapes: bool = True,
    period: int = 1,
    local_scale: float | torch.Tensor = 1.0,
    row_beta: float | torch.Tensor | None = None,
) -> GradientTransformation[MuonState]:
    """Replace every gradient by its running mean, orthogonalised and scaled by the shape of the matrix; see `muon`.

    Args:
        owner_layout: see `muon`.
        momentum: see `muon`.
        nesterov: see `muon`.
        bias_correction: correct the running mean for its start at zero, as Optax does and `torch.optim.Muon` does not.
            (That changes how gradient and mean are mixed; the scale of a matrix is lost in its orthogonalisation.)
        orthogonalize: matrices of one shape, ``(..., m, n)``, to as many of that shape.
        adjust_lr_fn: see `muon`.
        ns_dtype: the dtype in which matrices travel to their owners and back; by default bfloat16 on CUDA, else that of
            the parameters. `orthogonalize` may compute in another.
        blocks: see `muon`.
        batch_of_matrices: see `muon`.
        stack_equal_shapes: see `muon`.
        period: see `muon`.
        local_scale: see `muon`.
        row_beta: see `muon`.

    Raises:
        ValueError: see `muon`.
        KeyError: in `update`, where the gradient of a tensor is missing.
    """
    ratio = ratio_fn(adjust_lr_fn)
    if not isinstance(momentum, torch.Tensor) and not 0 <= momentum <= 1:
        raise ValueError(f"muon: momentum must lie in [0, 1], got {momentum}")
    _check_period(period, row_beta)
    work = BlockWork(owner_layout, blocks, batch_of_matrices)
    periodic = period > 1 and owner_layout is not None
    local = BlockWork(owner_layout, blocks, batch_of_matrices, local=True) if periodic else work

    def init(params: Mapping[Any, torch.Tensor]) -> MuonState:
        own = {i: param for i, param in params.items() if work.takes_part(i)}
        for i, param in own.items():
            work.parts_of(i, param.shape)  # raises on what is no matrix
        means = {i: torch.zeros_like(param) for i, param in own.items()}
        rows = () if row_beta is None else work.first_row_squares(own)
        return MuonState(first_step(own), means, rows, HostCount.of(period) if periodic else ())

    def mix(mean: torch.Tensor, grad: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        if bias_correction:
            now, ahead = (1 - momentum ** (step.double() + n) for n in (1, 2))
            return mixed(grad / now, mean / ahead, 1 - momentum) if nesterov else mean / now
        return mixed(grad, mean, 1 - momentum) if nesterov else mean

    def update(
        grads: Mapping[Any, torch.Tensor], state: MuonState, params: Mapping[Any, torch.Tensor]
    ) -> tuple[dict[Any, torch.Tensor], MuonState]:
        if missing := [i for i in state.momentum if i not in grads or i not in params]:
            raise KeyError(f"muon: no gradient or parameter of tensor {missing[0]!r} ({len(missing)} missing in all)")
        given = {i: grads[i].to(mean.dtype) for i, mean in state.momentum.items()}
        means = {i: mixed(mean, given[i], momentum) for i, mean in state.momentum.items()}
        mixtures = {i: mix(mean, given[i], state.step) for i, mean in means.items()}
        since, rows = state.since_exchange, state.row_squares
        if isinstance(since, HostCount) and since.value != period:
            updates, _ = local.run(orthogonalize, mixtures, ratio, stack=stack_equal_shapes)
            updates = {i: update * local_scale for i, update in updates.items()}
            return updates, MuonState(state.step + 1, means, rows, since.next())
        updates, rows = work.run(
            orthogonalize,
            mixtures,
            ratio,
            stack=stack_equal_shapes,
            dtype=ns_dtype,
            row_squares=rows or {},
            row_beta=row_beta,
        )
        return updates, MuonState(
            state.step + 1, means, () if row_beta is None else rows, HostCount.of(1) if periodic else ()
        )

    where = Where() if owner_layout is None else Where(owners=(owner_layout,))
    return _checked(GradientTransformation(init, update, owner_layout is None, Needs(where=where)), work)


def _check_period(period: int, row_beta: float | torch.Tensor | None) -> None:
    if period < 1:
        raise ValueError(f"muon: period must be at least 1, got {period}")
    if row_beta is None:
        return
    if not isinstance(row_beta, torch.Tensor) and not 0 <= row_beta <= 1:
        raise ValueError(f"muon: row_beta must lie in [0, 1], got {row_beta}")
    if period > 1:
        raise ValueError(
            f"muon: period={period} with row_beta={row_beta}: running means of rows lie with the owners, who know nothing of"
            " the updates in between; give one of the two"
        )


def _checked(transformation: GradientTransformation[MuonState], work: BlockWork) -> GradientTransformation[MuonState]:
    """Of buffers, all tensors must take part: an update without some of them would leave them untrained."""
    on_buffers = on_tensors(transformation)

    def init(params: Any) -> MuonState:
        for key, buffer in buffers_in(params):
            for i, shape in enumerate(buffer.layout.tensor_shapes):
                if work.owners is None and buffer.spec.is_sharded and buffer.mesh.size() > 1:
                    raise ValueError(
                        f"muon: {buffer} holds shards, whose owners must be known; give owner_layout=, for a dict of buffers"
                        " by name: {name: GroupOwnerLayout.from_params(mesh, buffer.layout, placements=buffer.placements)}"
                    )
                if work.owners is not None and shape.numel() and not work.takes_part(key(i)):
                    raise ValueError(
                        f"muon: tensor {key(i)!r} {tuple(shape)} has no owner in the owner layout; name the groups as the"
                        " buffers (owner_layout={name: owners}), and leave tensors that are no matrices to another"
                        " transformation: partition((keys, muon(...)), (other keys, adamw(...))), or from_route"
                    )
        return on_buffers.init(params)

    return GradientTransformation(init, on_buffers.update, on_buffers.whole, on_buffers.needs)
