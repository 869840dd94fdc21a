"""Owners for many parameter groups at once: even work over all of them, with bytes moved and topology in the price."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh
from mfsdp_func.values.owner_planning import CostFn, Costs, tensor_costs
from mfsdp_func.values.owner_search import Assignment, Item, Work, pack_evenly, pack_near, pack_on_holders
from mfsdp_func.values.placement import Placement, RowAtomic
from mfsdp_func.values.ranges import Range
from mfsdp_func.values.value import as_ints

_STRETCHES = (1.0, 1.02, 1.05, 1.1, 1.25, 2.0, float("inf"))
"""How far above the best load found plans may go that move less."""


class WorkGroup(NamedTuple):
    """Tensors of one flat buffer that need owners; `placements` as in `GroupOwnerLayout`."""

    layout: GlobalLayout
    mesh: Mesh | MeshLike
    tensor_indices: Iterable[int]
    placements: Sequence[Placement] | None = None


AnyGroup: TypeAlias = WorkGroup | tuple[GlobalLayout, Mesh | MeshLike, Iterable[int]]


@dataclass(frozen=True)
class Trade:
    """What a choice of owners costs, over all groups.

    Attributes:
        max_load: work of the busiest rank, in units of the cost function.
        mean_load: work of all tensors over the number of ranks.
        load_bound: no choice of owners has a smaller `max_load`; see `mfsdp_func.values.load_bound.load_lower_bound`.
        moved_nbytes: bytes that one gather of all groups sends between ranks, in one replica group.
        inter_node_nbytes: those of them that leave a node.
        least_nbytes: no choice of owners moves fewer bytes: each tensor on the rank that holds most of it.
        objective: see `balance_owner_work`.
    """

    max_load: float
    mean_load: float
    load_bound: float
    moved_nbytes: int
    inter_node_nbytes: int
    least_nbytes: int
    objective: float

    @property
    def imbalance(self) -> float:
        """Load, max over mean; 1 where there is no work."""
        return self.max_load / self.mean_load if self.mean_load else 1.0

    @property
    def imbalance_bound(self) -> float:
        """No choice of owners has a smaller `imbalance`."""
        return self.load_bound / self.mean_load if self.mean_load else 1.0

    def __str__(self) -> str:
        return (
            f"load max/mean {self.imbalance:.3f} (bound {self.imbalance_bound:.3f}), moved {self.moved_nbytes:,} bytes"
            f" (least {self.least_nbytes:,}), {self.inter_node_nbytes:,} of them between nodes"
        )


class OwnerBalance(NamedTuple):
    """What `balance_owner_work` returns.

    Attributes:
        owners: for each group, tensor index -> global rank of the owner, in ascending order of the index.
        trade: what they cost.
        frontier: of all plans tried, those that no other beats in both load and price of bytes, by ascending load.
    """

    owners: tuple[dict[int, int], ...]
    trade: Trade
    frontier: tuple[Trade, ...]


def balance_owner_work(
    groups: Iterable[AnyGroup],
    cost_fn: CostFn | Sequence[Costs] | None = None,
    *,
    byte_cost: float = 0.0,
    element_nbytes: int = 4,
    ranks_per_node: int | None = None,
    inter_node_factor: float = 8.0,
) -> OwnerBalance:
    """Choose an owner for each tensor of each group, so that work is even over all groups together.

    Minimises ``max load + byte_cost * (bytes within nodes + inter_node_factor * bytes between nodes) / ranks``: the
    work of the busiest rank, and the price of moving the average rank's bytes. Equal objectives (always so among
    equally even plans with ``byte_cost=0``) are decided by fewer priced bytes. An owner may hold nothing of its
    tensor.

    The most even plan found (`owner_search.pack_evenly`) competes with plans that keep tensors with their holders
    under looser and looser capacities; in each, tensors of equal cost trade places so that less moves. Deterministic:
    the same on every rank, for groups in the same order. About half a second for 10,000 matrices on 64 ranks.

    Args:
        groups: `WorkGroup` values or ``(layout, mesh, tensor indices)``; meshes may differ.
        cost_fn: the work of a tensor, or for each group, that or tensor index -> work; by default ``ns_cost_fn()``.
        byte_cost: the work that a rank could do while it sends one byte within a node, in units of `cost_fn`.
        element_nbytes: bytes of one element.
        ranks_per_node: global rank r is on node ``r // ranks_per_node``; by default all ranks are on one.
        inter_node_factor: the price of a byte between nodes, in bytes within one; at least 1.

    Returns:
        Owners per group, what they cost, and the trade between load and bytes. Where an axis replicates, owners are
        named by the replica group of the mesh's first rank.

    Raises:
        ValueError: if nobody holds a tensor, an index stands twice in a group, a cost or price is refused, or groups
            replicate over sets of ranks that overlap without being equal.
        IndexError: if an index is not one of its layout's.

    >>> from mfsdp_func.values.layout_builder import build_for_row_atomic
    >>> layout = build_for_row_atomic([(4, 4), (2, 4)], 2)
    >>> balance = balance_owner_work([(layout, Mesh(2), [0, 1])] * 2, lambda shape: shape[0])
    >>> balance.owners, balance.trade.imbalance
    (({0: 0, 1: 0}, {0: 1, 1: 1}), 1.0)
    """
    if not (byte_cost >= 0 and inter_node_factor >= 1 and element_nbytes > 0 and (ranks_per_node or 1) > 0):
        raise ValueError(
            "balance_owner_work: byte_cost must be >= 0, inter_node_factor >= 1, element_nbytes and ranks_per_node > 0,"
            f" got {byte_cost}, {inter_node_factor}, {element_nbytes} and {ranks_per_node}"
        )
    given = [group if isinstance(group, WorkGroup) else WorkGroup(*group) for group in groups]
    cost_fns = list(cost_fn) if isinstance(cost_fn, Sequence) else [cost_fn] * len(given)
    if len(cost_fns) != len(given):
        raise ValueError(f"balance_owner_work: {len(cost_fns)} costs for {len(given)} groups; give one for each")
    work, ranks_of_group = _read(given, cost_fns, ranks_per_node, inter_node_factor)
    even = pack_evenly(work)
    peak = max(work.loads(even), default=0.0)
    plans = [even]
    for stretch in _STRETCHES if byte_cost else _STRETCHES[:1]:
        # The first is tried in vain where packing is tight; without a price on bytes, nothing pays for a higher load.
        plan = pack_on_holders(work, peak * stretch)
        if plan is not None and plan not in plans:
            plans.append(plan)
    near = [pack_near(work, plan) for plan in plans]
    measured = sorted(
        ((_measure(work, plan, price, byte_cost, element_nbytes), price, plan) for price, plan in near),
        key=lambda item: (item[0].max_load, item[1]),
    )
    best, _, plan = min(measured, key=lambda item: (item[0].objective, item[1]))
    frontier = [
        trade for n, (trade, price, _) in enumerate(measured) if all(price < other for _, other, _ in measured[:n])
    ]
    owners: list[dict[int, int]] = [{} for _ in ranks_of_group]
    for item, machine in zip(work.items, plan, strict=True):
        owners[item.group][item.tensor] = ranks_of_group[item.group][machine]
    return OwnerBalance(tuple(dict(sorted(mapping.items())) for mapping in owners), best, tuple(frontier))


class _Machines:
    """Ranks as machines: one each, or one for the ranks of all replica groups that stand for one another."""

    def __init__(self, ranks_per_node: int | None) -> None:
        self._ranks_per_node = ranks_per_node
        self._of_rank: dict[int, int] = {}
        self._ranks: list[tuple[int, ...]] = []
        self._known: dict[tuple[Mesh, tuple[int, ...]], int] = {}
        self.families: list[tuple[int, ...]] = []
        self.rank_of: list[dict[int, int]] = []
        """For each family, machine -> rank in the replica group of the mesh's first rank."""
        self.node_of: list[int] = []

    def family(self, mesh: Mesh, axes: tuple[int, ...], group: int) -> int:
        """The family of machines of a mesh that is cut along `axes`."""
        if (mesh, axes) not in self._known:
            ranks = mesh.shard_ranks(axes, mesh.ranks[0])
            others = [axis for axis in range(mesh.ndim) if axis not in axes]
            family = tuple(self._machine(mesh.shard_ranks(others, rank), group) for rank in ranks)
            self._known[mesh, axes] = len(self.families)
            self.families.append(family)
            self.rank_of.append(dict(zip(family, ranks, strict=True)))
        return self._known[mesh, axes]

    def _machine(self, replicas: tuple[int, ...], group: int) -> int:
        replicas = tuple(sorted(replicas))
        known = {self._of_rank.get(rank) for rank in replicas}
        if known == {None}:
            self._of_rank |= dict.fromkeys(replicas, len(self._ranks))
            self._ranks.append(replicas)
            self.node_of.append(replicas[0] // self._ranks_per_node if self._ranks_per_node else 0)
        elif len(known) > 1 or self._ranks[self._of_rank[replicas[0]]] != replicas:
            raise ValueError(
                f"balance_owner_work: group {group} replicates over ranks {replicas}, which overlap with those of"
                " another group without being equal; balance those groups in separate calls"
            )
        return self._of_rank[replicas[0]]


def _read(
    groups: Sequence[WorkGroup],
    cost_fns: Sequence[Costs | None],
    ranks_per_node: int | None,
    inter_node_factor: float,
) -> tuple[Work, list[dict[int, int]]]:
    """All items, and for each group, machine -> rank."""
    machines = _Machines(ranks_per_node)
    holdings: dict[tuple[GlobalLayout, int], dict[int, _Holders]] = {}
    items: list[tuple[tuple[float, int, int], Item]] = []
    family_of: list[int] = []
    for g, group in enumerate(groups):
        mesh, layout = as_mesh(group.mesh), group.layout
        placements = (RowAtomic(),) * mesh.ndim if group.placements is None else tuple(group.placements)
        family = machines.family(mesh, layout.check_placements(mesh, placements), g)
        family_of.append(family)
        indices = as_ints(f"balance_owner_work: tensor_indices of group {g}", group.tensor_indices)
        costs = tensor_costs(layout, indices, cost_fns[g])
        if len(costs) != len(indices):
            raise ValueError(f"balance_owner_work: group {g} holds a tensor index more than once")
        known = holdings.setdefault((layout, family), {})
        for i in indices:
            if i not in known:
                known[i] = _holders(layout, i, machines.families[family], machines.node_of, inter_node_factor)
            if not known[i].held:
                raise ValueError(
                    f"balance_owner_work: nobody holds tensor {i} {tuple(layout.tensor_shapes[i])} of group {g}; leave"
                    " out tensors without rows"
                )
            item = Item(g, i, costs[i], layout.tensor_numels[i], family, *known[i])
            items.append(((-costs[i], g, layout.tensor_to_offset[i]), item))
    items.sort(key=lambda pair: pair[0])
    work = Work(tuple(item for _, item in items), tuple(machines.families), tuple(machines.node_of), inter_node_factor)
    return work, [machines.rank_of[family] for family in family_of]


class _Holders(NamedTuple):
    """Who holds a tensor; see `Item`."""

    held: dict[int, int]
    saved: dict[int, float]
    on_node: dict[int, int]


def _holders(
    layout: GlobalLayout, tensor: int, family: Sequence[int], node_of: Sequence[int], inter_node_factor: float
) -> _Holders:
    shards = layout.shards_of(tensor, Range(0, layout.tensor_numels[tensor]), len(family))
    held = {family[k]: part.numel for k, part in shards}
    on_node: dict[int, int] = defaultdict(int)
    for machine, numel in held.items():
        on_node[node_of[machine]] += numel
    saved = {m: numel + (inter_node_factor - 1) * on_node[node_of[m]] for m, numel in held.items()}
    return _Holders(held, {m: saved[m] for m in sorted(saved, key=saved.__getitem__, reverse=True)}, dict(on_node))


def _measure(work: Work, plan: Assignment, price: float, byte_cost: float, element_nbytes: int) -> Trade:
    ranks = max(1, len(work.node_of))
    peak, moved, between = max(work.loads(plan), default=0.0), 0, 0
    for item, machine in zip(work.items, plan, strict=True):
        moved += item.numel - item.held.get(machine, 0)
        between += item.numel - item.on_node.get(work.node_of[machine], 0)
    return Trade(
        max_load=peak,
        mean_load=sum(item.cost for item in work.items) / ranks,
        load_bound=work.bound,
        moved_nbytes=element_nbytes * moved,
        inter_node_nbytes=element_nbytes * between,
        least_nbytes=element_nbytes * sum(item.numel - max(item.held.values()) for item in work.items),
        objective=peak + byte_cost * element_nbytes * price / ranks,
    )
