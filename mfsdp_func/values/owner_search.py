"""Packing work into ranks: the search behind `balance`. Items are tensors, machines the ranks that may own them."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import islice
from typing import NamedTuple, TypeAlias

from mfsdp_func.values.load_bound import load_lower_bound

_ROUNDING = 1 + 1e-9
_CLOSE = 1 + 1e-3
"""A load this near to its lower bound is not worth more search."""
_LEVEL_STEPS = 128
_HOLDERS_TRIED = 64
"""Of the holders of one item: of more than that, each has too little for the choice to matter."""
_WISHES = 250_000


class Item(NamedTuple):
    """One tensor to place.

    Attributes:
        group: position of its group.
        tensor: its index there.
        cost: its work.
        numel: its elements.
        family: which of ``Work.families`` may own it.
        held: machine -> elements that it holds.
        saved: each of them -> what less it costs to move the tensor there than to a machine of a node that holds nothing,
            in priced elements; the best owners come first.
        on_node: node -> elements that its machines hold.
    """

    group: int
    tensor: int
    cost: float
    numel: int
    family: int
    held: Mapping[int, int]
    saved: Mapping[int, float]
    on_node: Mapping[int, int]


Assignment: TypeAlias = list[int]
"""A machine for each item."""


@dataclass(frozen=True)
class Work:
    """What there is to place, and where.

    Attributes:
        items: by descending cost.
        families: sets of machines, each in buffer order.
        node_of: the node of each machine.
        inter_node_factor: price of an element that moves between nodes, in elements moved within one.
    """

    items: tuple[Item, ...]
    families: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]
    inter_node_factor: float

    @cached_property
    def node_count(self) -> int:
        """Number of nodes."""
        return len(set(self.node_of))

    @cached_property
    def used_families(self) -> tuple[int, ...]:
        """The families that have items."""
        return tuple(sorted({item.family for item in self.items}))

    @cached_property
    def alike(self) -> tuple[tuple[tuple[int, ...], list[tuple[int, int]]], ...]:
        """The items of each cost and family, if more than one; and which would like which machine, who saves most first."""
        found: dict[tuple[float, int], list[int]] = defaultdict(list)
        for n, item in enumerate(self.items):
            found[item.cost, item.family].append(n)
        return tuple((tuple(numbers), self._wishes(numbers)) for numbers in found.values() if len(numbers) > 1)

    def _wishes(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        tried = max(2, min(_HOLDERS_TRIED, _WISHES // len(numbers)))
        wishes = [
            (-saved, n, machine) for n in numbers for machine, saved in islice(self.items[n].saved.items(), tried)
        ]
        return [(n, machine) for _, n, machine in sorted(wishes)]

    @cached_property
    def bound(self) -> float:
        """See `load_lower_bound`."""
        return load_lower_bound([item.cost for item in self.items], max(1, len(self.node_of)))

    def loads(self, plan: Assignment) -> list[float]:
        """Work of each machine."""
        loads = [0.0] * len(self.node_of)
        for item, machine in zip(self.items, plan, strict=True):
            loads[machine] += item.cost
        return loads

    def price_of(self, item: Item, machine: int) -> float:
        """Priced elements that move where `machine` owns `item`."""
        saved = item.saved.get(machine)
        if saved is None:
            saved = (self.inter_node_factor - 1) * item.on_node.get(self.node_of[machine], 0)
        return self.inter_node_factor * item.numel - saved

    def price(self, plan: Assignment) -> float:
        """Priced elements that move under a plan."""
        return sum(map(self.price_of, self.items, plan))


def pack_evenly(work: Work) -> Assignment:
    """The most even plan found, whatever it moves.

    Longest processing time first (Graham, 1969); best-fit decreasing under a bisected capacity (MULTIFIT: Coffman,
    Garey and Johnson, 1978); then moves and swaps off the busiest machine.
    """
    plan = _longest_first(work)
    low, high = work.bound, max(work.loads(plan), default=0.0)
    if len(work.used_families) == 1:
        for attempt in range(10):
            if high <= work.bound * _CLOSE:
                break
            capacity = low if attempt == 0 else (low + high) / 2
            packed = _best_fit(work, capacity * _ROUNDING)
            if packed is None:
                low = capacity
            else:
                plan, high = packed, max(work.loads(packed))
    return _level(work, plan)


def _longest_first(work: Work) -> Assignment:
    """Each item, by descending cost, to the least loaded machine of its family; ties in buffer order."""
    loads = [0.0] * len(work.node_of)
    heaps: dict[object, list[tuple[float, int, int]]] = {}
    plan: Assignment = []
    for item in work.items:
        machine = _least_loaded(heaps, loads, item.family, work.families[item.family])
        loads[machine] += item.cost
        plan.append(machine)
    return plan


def _least_loaded(
    heaps: dict[object, list[tuple[float, int, int]]], loads: Sequence[float], name: object, machines: Sequence[int]
) -> int:
    """The first least loaded of `machines`, from a heap under `name` whose entries may be older than the loads."""
    heap = heaps.get(name)
    if heap is None:
        heap = heaps[name] = [(loads[machine], n, machine) for n, machine in enumerate(machines)]
        heapify(heap)
    while heap[0][0] != loads[heap[0][2]]:
        _, n, machine = heap[0]
        heapreplace(heap, (loads[machine], n, machine))
    return heap[0][2]


def _best_fit(work: Work, capacity: float) -> Assignment | None:
    """Each item, by descending cost, to the fullest machine that still has room; None where one has no room."""
    rooms = [(capacity, machine) for machine in sorted(work.families[work.items[0].family])]
    plan: Assignment = []
    for item in work.items:
        at = bisect_left(rooms, (item.cost, -1))
        if at == len(rooms):
            return None
        room, machine = rooms.pop(at)
        insort(rooms, (room - item.cost, machine))
        plan.append(machine)
    return plan


def _level(work: Work, plan: Assignment) -> Assignment:
    """Move or swap items off the busiest machine while that lowers its load and makes no other as busy."""
    plan, loads = list(plan), work.loads(plan)
    owned: list[dict[float, list[int]]] = [defaultdict(list) for _ in loads]
    for n, machine in enumerate(plan):
        owned[machine][work.items[n].cost].append(n)
    for _ in range(_LEVEL_STEPS):
        busiest = max(range(len(loads)), key=loads.__getitem__, default=None)
        if busiest is None or loads[busiest] <= work.bound * _CLOSE:
            break
        step = _best_step(work, loads, owned, busiest)
        if step is None:
            break
        give, other, take = step
        for n, source, target in ((give, busiest, other), (take, other, busiest)):
            if n is not None:
                cost = work.items[n].cost
                owned[source][cost].remove(n)
                owned[target][cost].append(n)
                loads[source] -= cost
                loads[target] += cost
                plan[n] = target
    return plan


def _best_step(
    work: Work, loads: Sequence[float], owned: Sequence[Mapping[float, list[int]]], busiest: int
) -> tuple[int, int, int | None] | None:
    """The item to give, the machine to give it to and the item to take in return that leave the lower of two peaks."""
    best, step = loads[busiest] / _ROUNDING, None
    for other in sorted(range(len(loads)), key=loads.__getitem__)[:16]:
        gap = loads[busiest] - loads[other]
        returns: list[tuple[float, int | None]] = [(0.0, None)]
        returns += [(cost, items[-1]) for cost, items in owned[other].items() if items][:64]
        for cost, items in list(owned[busiest].items())[:64]:
            for back, take in returns:
                delta = cost - back
                peak = max(loads[busiest] - delta, loads[other] + delta)
                if items and 0 < delta < gap and peak < best:
                    give = items[-1]
                    fits = other in work.families[work.items[give].family]
                    if fits and (take is None or busiest in work.families[work.items[take].family]):
                        best, step = peak, (give, other, take)
    return step


def pack_near(work: Work, plan: Assignment) -> tuple[float, Assignment]:
    """The same loads, up to names of machines, with less to move; and the price of that.

    Machines trade their whole loads, then items of equal cost trade places: first each to a holder, those that gain
    most before others, then the rest to a machine on a holder's node.
    """
    best = min(((work.price(each), each) for each in (plan, _renamed(work, plan))), key=_first)
    traded = list(best[1])
    for numbers, wishes in work.alike:
        _trade(work, numbers, wishes, traded)
    return min(best, (work.price(traded), traded), key=_first)


def _first(pair: tuple[float, Assignment]) -> float:
    return pair[0]


def _trade(work: Work, numbers: Sequence[int], wishes: Sequence[tuple[int, int]], plan: Assignment) -> None:
    """Hand the places of some items out among them."""
    places: dict[int, int] = defaultdict(int)
    for n in numbers:
        places[plan[n]] += 1
    left = dict.fromkeys(numbers)
    for n, machine in wishes:
        if n in left and places.get(machine):
            plan[n] = machine
            places[machine] -= 1
            del left[n]
    free: dict[int, list[int]] = defaultdict(list)
    for machine, count in places.items():
        free[work.node_of[machine]] += [machine] * count
    for chosen in (lambda item: item.on_node, lambda item: tuple(free)):
        for n in list(left):
            item = work.items[n]
            nodes = [node for node in chosen(item) if free.get(node)]
            if nodes:
                plan[n] = free[max(nodes, key=lambda node: item.on_node.get(node, 0))].pop()
                del left[n]


def _renamed(work: Work, plan: Assignment) -> Assignment:
    """The plan with whole loads handed from machine to machine, each to one that holds much of it."""
    if len(work.used_families) != 1:
        return plan
    tried = max(2, min(_HOLDERS_TRIED, _WISHES // max(1, len(work.items))))
    gains: dict[tuple[int, int], int] = defaultdict(int)
    for item, machine in zip(work.items, plan, strict=True):
        for holder in islice(item.saved, tried):
            gains[machine, holder] += item.held[holder]
    name: dict[int, int] = {}
    taken = set[int]()
    for (machine, holder), _ in sorted(gains.items(), key=lambda pair: (-pair[1], pair[0])):
        if machine not in name and holder not in taken:
            name[machine] = holder
            taken.add(holder)
    family = work.families[work.used_families[0]]
    free = (machine for machine in family if machine not in taken)
    name |= {machine: next(free) for machine in family if machine not in name}
    return [name[machine] for machine in plan]


def pack_on_holders(work: Work, capacity: float) -> Assignment | None:
    """Each item to the cheapest of its holders that has room under a capacity.

    Else to the least loaded machine of the node that holds most of it, else to the least loaded machine; None where
    that has no room either.
    """
    capacity *= _ROUNDING
    loads = [0.0] * len(work.node_of)
    heaps: dict[object, list[tuple[float, int, int]]] = {}
    on_node: dict[tuple[int, int], tuple[int, ...]] = {}
    plan: Assignment = []
    for item in work.items:
        room = capacity - item.cost
        machine = _best_holder(item, loads, room)
        if machine is None and work.node_count > 1:
            node = max(item.on_node, key=item.on_node.__getitem__)
            name = node, item.family
            if name not in on_node:
                on_node[name] = tuple(m for m in work.families[item.family] if work.node_of[m] == node)
            least = _least_loaded(heaps, loads, name, on_node[name])
            machine = least if loads[least] <= room else None
        if machine is None:
            machine = _least_loaded(heaps, loads, item.family, work.families[item.family])
            if loads[machine] > room:
                return None
        loads[machine] += item.cost
        plan.append(machine)
    return plan


def _best_holder(item: Item, loads: Sequence[float], room: float) -> int | None:
    """Of the holders that have room, the one that saves most; of several such, the least loaded."""
    best, most = None, 0.0
    for machine, saved in islice(item.saved.items(), _HOLDERS_TRIED):
        if loads[machine] <= room:
            if best is None:
                best, most = machine, saved
            elif saved < most:
                break
            elif loads[machine] < loads[best]:
                best = machine
    return best
