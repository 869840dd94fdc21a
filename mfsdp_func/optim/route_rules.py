"""The rules of `route`: what modules and names tell about a parameter, and what follows."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from mfsdp_func.optim.blocks import Blocks, blocks

_EMBEDDINGS = ("embed", "wte", "wpe", "position", "token_type")
_HEADS = ("lm_head", "head", "output", "classifier", "score", "embed_out", "unembed", "qa_outputs", "cls")
_FUSED_ROWS = ("qkv", "qkv_proj", "wqkv", "in_proj_weight", "c_attn", "query_key_value")
_PER_CHANNEL = ("A_log", "D", "dt_bias")


class Facts(NamedTuple):
    """What is known of one parameter.

    Attributes:
        name: its first name.
        shape: its full shape.
        trainable: whether it takes gradients.
        kind: class name of the module that owns it; empty where only names are known.
        owner: that module.
        in_block: whether it belongs to a repeated block.
        is_head: whether it makes the model's outputs.
        is_embedding: whether it is a table that is looked up.
        blocks_exist: whether the model has repeated blocks at all.
        config: of the model, where it has one.
        beside: shapes of the other parameters of the same module.
    """

    name: str
    shape: torch.Size
    trainable: bool
    kind: str
    owner: nn.Module | None
    in_block: bool
    is_head: bool
    is_embedding: bool
    blocks_exist: bool
    config: Any
    beside: Mapping[str, torch.Size]

    @property
    def leaf(self) -> str:
        """The last word that says what it is: the module's own name for ``weight`` and ``bias``."""
        words = self.name.split(".")
        return words[-2] if words[-1] in ("weight", "bias") and len(words) > 1 else words[-1]


def facts_of_module(module: nn.Module) -> list[Facts]:
    """One entry per physical parameter, in module order."""
    modules = dict(module.named_modules())
    repeated = [
        f"{name}.{n}." for name, sub in modules.items() if isinstance(sub, nn.ModuleList) for n in range(len(sub))
    ]
    heads = set[int]()
    output = getattr(module, "get_output_embeddings", None)
    try:
        made = output() if callable(output) else None
    except (NotImplementedError, AttributeError):
        made = None
    if isinstance(made, nn.Module):
        heads = {id(param) for param in made.parameters()}
    tables = {
        id(param)
        for sub in modules.values()
        if isinstance(sub, nn.Embedding | nn.EmbeddingBag) or type(sub).__name__.endswith("Embedding")
        for param in sub.parameters(recurse=False)
    }
    found: list[Facts] = []
    for name, param in module.named_parameters():
        path, _, _ = name.rpartition(".")
        owner = modules[path]
        in_block = any(name.startswith(prefix) for prefix in repeated)
        beside = {leaf: other.shape for leaf, other in owner.named_parameters(recurse=False)}
        found.append(
            Facts(
                name,
                param.shape,
                param.requires_grad,
                type(owner).__name__,
                owner,
                in_block,
                id(param) in heads or (not in_block and _is_head(name)),
                id(param) in tables or (not in_block and _is_embedding(name)),
                bool(repeated),
                getattr(module, "config", None),
                beside,
            )
        )
    return found


def facts_of_shapes(shapes: Mapping[str, Iterable[int]]) -> list[Facts]:
    """The same from names alone: blocks are what has a number in its name."""
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    inside = {name: any(word.isdecimal() for word in name.split(".")) for name in sizes}
    found: list[Facts] = []
    for name, shape in sizes.items():
        path = name.rpartition(".")[0]
        beside = {other.rpartition(".")[2]: size for other, size in sizes.items() if other.rpartition(".")[0] == path}
        outside = not inside[name]
        found.append(
            Facts(
                name,
                shape,
                True,
                "",
                None,
                inside[name],
                outside and _is_head(name),
                outside and _is_embedding(name),
                any(inside.values()),
                None,
                beside,
            )
        )
    return found


def _is_head(name: str) -> bool:
    words = name.split(".")
    return len(words) > 1 and words[-2].lower() in _HEADS


def _is_embedding(name: str) -> bool:
    return any(word in name.lower() for word in _EMBEDDINGS)


def decide(fact: Facts) -> tuple[Blocks | None, str]:
    """The block spec for Muon, or None for AdamW; and why."""
    if len(fact.shape) < 2:
        return None, _vector(fact)
    if fact.is_embedding:
        return None, "embedding, also the head" if fact.is_head else "embedding"
    if fact.is_head:
        return None, "head"
    if fact.leaf in _PER_CHANNEL or min(fact.shape) == 0:
        return None, "numbers per channel: not a matrix"
    if "norm" in fact.kind.lower():
        return None, "norm"
    convolution = _convolution(fact)
    if convolution is not None and convolution[0] is None:
        return convolution
    if fact.blocks_exist and not fact.in_block:
        return None, "outside of the blocks"
    if convolution is not None:
        return convolution
    if len(fact.shape) == 3:
        return _experts(fact)
    return _matrix(fact)


def _vector(fact: Facts) -> str:
    words = f"{fact.kind} {fact.leaf}".lower()
    if "norm" in words or fact.leaf.startswith("ln"):
        return "norm"
    return "bias: not a matrix" if fact.name.endswith("bias") else "vector: not a matrix" if fact.shape else "scalar"


def _convolution(fact: Facts) -> tuple[Blocks | None, str] | None:
    owner = fact.owner
    groups = owner.groups if isinstance(owner, nn.modules.conv._ConvNd) else 1
    if owner is None and len(fact.shape) >= 3 and fact.shape[1] == 1:
        return None, "depthwise convolution: not a matrix"
    if not isinstance(owner, nn.modules.conv._ConvNd):
        named = owner is None and "conv" in fact.name.lower() and len(fact.shape) == 3
        return (blocks("o ... -> o (...)"), "convolution") if named or len(fact.shape) > 3 else None
    if groups > 1 and fact.shape[1] == 1:
        return None, "depthwise convolution: not a matrix"
    spec = "(g i) o ... -> g o (i ...)" if owner.transposed else "(g o) i ... -> g o (i ...)"
    return blocks(spec, g=groups), "convolution" if groups == 1 else f"convolution in {groups} groups"


def _experts(fact: Facts) -> tuple[Blocks | None, str]:
    down = fact.beside.get("down_proj")
    count, rows, columns = fact.shape
    if fact.leaf == "gate_up_proj" and down is not None:
        width = down[2] if down[1] == columns else down[1]
        if fact.kind == "GptOssExperts":
            return blocks("e i (o two) -> e two o i", two=2), "experts, gate and up by turns, transposed"
        if rows == 2 * width and down[1] == columns:
            return blocks("e (gate + up) i -> e gate i | e up i", gate=width), "experts, gate and up"
        if columns == 2 * width:
            return blocks("e i (gate + up) -> e gate i | e up i", gate=width), "experts, gate and up, transposed"
    return blocks("e o i -> e o i"), f"batch of {count} matrices of a block"


def _matrix(fact: Facts) -> tuple[Blocks | None, str]:
    why = "matrix of a block" if fact.in_block else "matrix"
    transposed = fact.kind == "Conv1D"
    rows, columns = reversed(fact.shape) if transposed else fact.shape
    leaf = fact.leaf.lower()
    if leaf in _FUSED_ROWS:
        parts = _query_key_value(fact, rows, columns)
        if parts is None:
            return blocks("n m -> m n" if transposed else "m ... -> m (...)"), f"{why}, fused in parts that are unknown"
        if leaf == "query_key_value":
            return blocks("(h three d) m -> three (h d) m", **parts), f"{why}, fused by head"
        left = "m (q + k + v)" if transposed else "(q + k + v) m"
        return blocks(f"{left} -> q m | k m | v m", **parts), f"{why}, fused{', transposed' if transposed else ''}"
    if leaf == "gate_up_proj" and rows % 2 == 0:
        return blocks("(gate + up) m -> gate m | up m", gate=rows // 2), f"{why}, gate and up"
    return blocks("n m -> m n" if transposed else "m ... -> m (...)"), f"{why}, transposed" if transposed else why


def _query_key_value(fact: Facts, rows: int, columns: int) -> dict[str, int] | None:
    """Sizes of a fused projection, from the configuration, or equal thirds."""
    config = fact.config
    heads = getattr(config, "num_attention_heads", None)
    if fact.leaf == "query_key_value":  # by head, in the models where that is so
        return {"h": heads, "three": 3} if heads and fact.kind and rows == 3 * columns else None
    shared = getattr(config, "num_key_value_heads", None) or heads
    if heads and shared and rows % (heads + 2 * shared) == 0:
        size = rows // (heads + 2 * shared)
        return {"q": heads * size, "k": shared * size, "v": shared * size}
    return dict.fromkeys("qkv", rows // 3) if rows == 3 * columns else None
