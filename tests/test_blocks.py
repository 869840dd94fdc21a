"""Block specs: the language, what it refuses, and splitting as a bijection."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfsdp_func import optim
from mfsdp_func.optim.block_layout import block_layout, owners_of_blocks
from mfsdp_func.optim.block_split import block_tree, join_blocks, matrices, pieces, split_blocks, split_tree
from mfsdp_func.optim.blocks import resolve
from mfsdp_func.values.layout_builder import build_for_row_atomic, build_for_row_atomic_unpadding
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout, ns_cost_fn
from tests.block_cases import CASES, Case


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def each_matrix(parts: tuple[torch.Tensor, ...]) -> list[list[list[int]]]:
    return [matrix.tolist() for part in parts for matrix in part.reshape(-1, *part.shape[-2:])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_splitting_is_what_slices_say(case: Case) -> None:
    weight = numbered(case.shape)
    assert each_matrix(split_blocks(weight, case.blocks)) == [matrix.tolist() for matrix in case.by_hand(weight)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_splitting_is_a_bijection(case: Case) -> None:
    weight = numbered(case.shape)
    parts = split_blocks(weight, case.blocks)
    assert torch.equal(join_blocks(parts, case.blocks, case.shape), weight)
    told = matrices(block_tree(case.blocks, case.shape))
    assert [(part.shape[:-2].numel(), tuple(part.shape[-2:])) for part in parts] == list(told)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pieces_are_runs_that_hold_the_same_blocks(case: Case) -> None:
    weight, end, found = numbered(case.shape), 0, []
    for piece in pieces(case.blocks, case.shape):
        assert piece.offset == end
        end += piece.shape.numel()
        found += each_matrix(split_tree(weight.flatten()[piece.offset : end].view(piece.shape), piece.tree))
    assert end == weight.numel()
    assert sorted(found) == sorted(each_matrix(split_blocks(weight, case.blocks)))
    assert len(pieces(case.blocks, case.shape)) == case.runs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_specs_are_values(case: Case) -> None:
    again = eval(repr(case.blocks), {"blocks": optim.blocks})
    assert (again, hash(again)) == (case.blocks, hash(case.blocks))
    assert pickle.loads(pickle.dumps(case.blocks)) == case.blocks
    assert optim.blocks(case.blocks.spec + "  ", **dict(case.blocks.sizes)) == case.blocks


@st.composite
def products(draw: st.DrawFn, names: list[str], depth: int = 0) -> tuple[str, list[list[str]]]:
    """Text of a dim, and for each of its parts, the axes."""
    text, parts = [], [[]]
    for _ in range(draw(st.integers(1, 2))):
        if depth < 2 and draw(st.booleans()):
            terms = [draw(products(names, depth + 1)) for _ in range(draw(st.integers(2, 3)))]
            text.append(f"({' + '.join(term for term, _ in terms)})")
            parts = [[*before, *after] for before in parts for _, options in terms for after in options]
        else:
            names.append(f"x{len(names)}")
            text.append(names[-1])
            parts = [[*before, names[-1]] for before in parts]
    return " ".join(text), parts


@given(st.data())
def test_random_specs_are_bijections(data: st.DataObject) -> None:
    names: list[str] = []
    dims = [data.draw(products(names)) for _ in range(data.draw(st.integers(1, 2)))]
    parts = [[]]
    for _, options in dims:
        parts = [[*before, *after] for before in parts for after in options]
    patterns = []
    for part in parts:
        order = data.draw(st.permutations(part))
        cut = data.draw(st.integers(0, len(order)))
        tail = data.draw(st.integers(0, cut))
        batch, m, n = order[:tail], order[tail:cut], order[cut:]
        patterns.append(" ".join([*batch, *(f"({' '.join(dim)})" for dim in (m, n))]))
    sizes = {name: data.draw(st.integers(1, 3)) for name in names}
    spec = optim.blocks(f"{' '.join(f'({dim})' for dim, _ in dims)} -> {' | '.join(patterns)}", **sizes)
    shape = tuple(eval_size(dim, sizes) for dim, _ in dims)
    weight = numbered(shape)
    blocks = split_blocks(weight, spec)
    assert torch.equal(join_blocks(blocks, spec, shape), weight)
    found = [
        matrix
        for piece in pieces(spec, shape)
        for matrix in each_matrix(
            split_tree(
                weight.flatten()[piece.offset : piece.offset + piece.shape.numel()].view(piece.shape), piece.tree
            )
        )
    ]
    assert sorted(found) == sorted(each_matrix(blocks))


def eval_size(dim: str, sizes: dict[str, int]) -> int:
    """The text of a dim as arithmetic."""
    words = dim.replace("(", " ( ").replace(")", " ) ").split()
    found: list[str] = []
    for word in words:
        if found and word not in ("+", ")") and found[-1] not in ("+", "(", "*"):
            found.append("*")
        found.append(str(sizes.get(word, word)))
    return eval(" ".join(found))


WRONG = [
    ("a b", {}, "with one arrow"),
    ("a b -> a", {}, "has 1 dims, a matrix has two"),
    ("a b -> a b | a b", {}, "takes a part that another one takes"),
    ("(a + b) c -> a c", {}, "no pattern takes the part with the axes b, c"),
    ("(a + b) c -> a c | b d", {}, r"must have the axes \{a, c\} or \{b, c\}"),
    ("a a -> a a", {}, "axis 'a' stands twice on the left"),
    ("(a + a) c -> a c | a c", {}, "fits more than one part"),
    ("a + b c -> a c", {}, "write a sum in parentheses"),
    ("(a + b c -> a c", {}, "a parenthesis is not closed"),
    ("(a + ) c -> a c", {}, "a sum has an empty term"),
    ("(a + b) c -> (a + b) c", {}, "one pattern for each part, separated by |"),
    ("a) b -> a b", {}, r"unexpected '\)'"),
    ("a-b c -> a c", {}, "cannot read '-b'"),
    ("(2 a) b -> a b", {}, "cannot read '2'"),
    ("(... a) b -> a b", {}, "may stand once, outside of parentheses"),
    ("a b -> a b", {"c": 1}, "a size is given for 'c', which is no axis"),
    ("a b -> a b", {"a": 0}, "must be a positive int, got 0"),
    ("a b -> a b", {"a": 2.0}, r"must be a positive int, got 2\.0"),
]


@pytest.mark.parametrize(("spec", "sizes", "message"), WRONG, ids=[spec for spec, _, _ in WRONG])
def test_what_is_no_bijection_is_refused(spec: str, sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.blocks(spec, **sizes)


UNFIT = [
    ("(a + b) c -> a c | b c", {}, (4, 3), "the sizes of 'a', 'b' do not follow from the shape"),
    ("(a + b) c -> a c | b c", {"a": 5}, (4, 3), r"dim 0: the known parts of '\(a \+ b\)' are 1 too many"),
    ("(a b) c -> a b c", {"a": 3}, (4, 3), "4 is no multiple of 3"),
    ("a b -> a b", {"a": 3}, (4, 3), "'a' is 3, the parameter has 4"),
    ("a b -> a b", {}, (4, 3, 2), "the left has 2 dims, the parameter 3"),
    ("... a -> ... a", {}, (3,), "pattern 'a' has no two dims"),
    ("... a b c -> a b c ...", {}, (3,), "the left has at least 3 dims, the parameter 1"),
]


@pytest.mark.parametrize(("spec", "sizes", "shape", "message"), UNFIT)
def test_a_shape_that_does_not_fit_is_refused(spec: str, sizes: dict, shape: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        resolve(optim.blocks(spec, **sizes), shape)
    assert str(shape) in str(caught.value)


# The finer layout


def test_a_finer_layout_is_of_the_same_buffer() -> None:
    for build in (build_for_row_atomic, build_for_row_atomic_unpadding):
        layout = build([case.shape for case in CASES], 3)
        finer = block_layout(layout, {i: case.blocks for i, case in enumerate(CASES)})
        assert (finer.fine.size, finer.fine.rank_to_offset) == (layout.size, layout.rank_to_offset)
        for i, case in enumerate(CASES):
            parts = finer.parts_of(i)
            assert len(parts) == case.runs
            assert finer.fine.tensor_to_offset[parts[0]] == layout.tensor_to_offset[i]
            assert sum(finer.fine.tensor_numels[j] for j in parts) == layout.tensor_numels[i]
    assert block_layout(layout, {0: CASES[0].blocks}) is block_layout(layout, {0: CASES[0].blocks})
    with pytest.raises(ValueError, match="the left has"):
        block_layout(layout, {0: "a b c d e f -> a b c d e f"})


def test_the_cost_is_that_of_the_matrices() -> None:
    layout = build_for_row_atomic_unpadding([(6, 8), (4, 6, 5)], 2)
    spec = optim.blocks("m (q + k) -> m q | m k", q=6)
    finer = block_layout(layout, {0: spec, 1: "e o i -> e o i"})
    cost = ns_cost_fn()
    assert finer.costs() == {
        0: cost(torch.Size([6, 6])) + cost(torch.Size([6, 2])),
        **dict.fromkeys(range(1, 5), cost(torch.Size([6, 5]))),
    }


def test_owners_of_blocks() -> None:
    layout = build_for_row_atomic([(8, 2), (4, 4), (2, 2)], 2)
    owners = GroupOwnerLayout(Mesh(2), layout, {0: 0, 1: 1}, name="both")
    spec = optim.blocks("(h d) m -> h d m", d=2)
    finer = owners_of_blocks(owners, {0: spec, 1: "m n -> n m", 2: spec})
    assert finer.layout.tensor_shapes == ((2, 2),) * 4 + ((4, 4), (2, 2))
    held = {j: layout_holders(finer, j) for j in range(4)}
    assert all(finer.tensor_to_owner[j] in held[j] for j in held)
    assert (finer.tensor_to_owner[4], finer.name) == (1, "both")
    assert 5 not in finer.tensor_to_owner


def layout_holders(owners: GroupOwnerLayout, tensor: int) -> list[int]:
    return owners.layout.holders_of(tensor, 2)
