"""Several plans as one: the exchanges of many groups at once, their small pieces sharing messages."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mfsdp_func.plans.plan import Exchange, Plan, RankView
from mfsdp_func.values.mesh import Mesh


@dataclass(frozen=True)
class JointPlan(Exchange):
    """The exchanges of `plans`, all of one mesh, as one; inputs and outputs of each stand behind those of the one before.

    Raises:
        ValueError: if there is no plan, or the plans are not all of one mesh.
    """

    plans: tuple[Plan, ...]

    def __post_init__(self) -> None:
        if not self.plans:
            raise ValueError("JointPlan: needs at least one plan")
        for plan in self.plans:
            if plan.mesh != self.mesh:
                raise ValueError(
                    f"{self.label}: all groups of one exchange must lie on one mesh, but {plan.label} is on {plan.mesh},"
                    f" {self.plans[0].label} on {self.mesh}; make one call per mesh"
                )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.plans)

    def __str__(self) -> str:
        """The tables of all plans; their small pieces share messages."""
        return "\n\n".join(map(str, self.plans))

    @property
    def mesh(self) -> Mesh:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The ranks."""
        return self.plans[0].mesh

    @property
    def label(self) -> str:
        """How errors and traces call this plan."""
        return f"{self.plans[0].label} and {len(self.plans) - 1} more"

    @cached_property
    def digest(self) -> str:
        """A hash of all that the ranks must agree on, the same in every process."""
        return hashlib.sha256(" ".join(plan.digest for plan in self.plans).encode()).hexdigest()

    @cached_property
    def transpose(self) -> "JointPlan":
        """The plan back. `plan.transpose.transpose is plan`."""
        back = JointPlan(tuple(plan.transpose for plan in self.plans))
        vars(back)["transpose"] = self
        return back

    def view(self, rank: int) -> RankView:
        """What `rank` holds, sends, receives and copies; transfers to and from one peer in the order of the plans.

        Raises:
            ValueError: if the rank is not in the mesh.
        """
        views = [plan.view(rank) for plan in self.plans]
        at = list(_starts(views))
        sends = [t._replace(slot=t.slot + i) for view, (i, _) in zip(views, at, strict=True) for t in view.sends]
        receives = [t._replace(slot=t.slot + o) for view, (_, o) in zip(views, at, strict=True) for t in view.receives]
        return RankView(
            inputs=tuple(slot for view in views for slot in view.inputs),
            outputs=tuple(slot for view in views for slot in view.outputs),
            sends=tuple(sends),
            receives=tuple(receives),
            copies=tuple(
                copy._replace(input_slot=copy.input_slot + i, output_slot=copy.output_slot + o)
                for view, (i, o) in zip(views, at, strict=True)
                for copy in view.copies
            ),
        )


@lru_cache(maxsize=256)
def join_plans(plans: tuple[Plan, ...]) -> Plan | JointPlan:
    """One plan for all: itself where there is one."""
    return plans[0] if len(plans) == 1 else JointPlan(plans)


def _starts(views: list[RankView]) -> Iterator[tuple[int, int]]:
    """The first input slot and the first output slot of each view."""
    inputs = outputs = 0
    for view in views:
        yield inputs, outputs
        inputs += len(view.inputs)
        outputs += len(view.outputs)
