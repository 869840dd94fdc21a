"""From what a user names to shapes: which parameters a model has, which share a buffer, and which are matrices of blocks."""

import difflib
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from mfsdp_func.fsdp.grouping import Entry, Group, Unit, group_parameters

Shapes: TypeAlias = Sequence[Sequence[int]]
ModelLike: TypeAlias = "str | Path | nn.Module | Shapes | Mapping[str, Shapes] | ModelShapes"
"""A file or class of a `transformers` configuration, ``module:function``, a module (on the meta device or not), shapes of
one buffer, or shapes by unit."""


@dataclass(frozen=True, eq=False)
class ModelShapes:
    """A model without its numbers.

    Attributes:
        label: how the caller called it.
        words: the same as words of the command line; empty where there are none.
        units: see `fully_shard`.
        groups: key -> the parameters of one buffer.
        module: the module on the meta device; None where only shapes are known.
        vocabulary: number of different tokens, where a configuration says it.
    """

    label: str
    words: tuple[str, ...]
    units: tuple[Unit, ...]
    groups: Mapping[str, Group]
    module: nn.Module | None
    vocabulary: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements of all parameters, tied ones once."""
        return sum(entry.shape.numel() for group in self.groups.values() for entry in group.entries)

    @property
    def tensors(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(len(group.entries) for group in self.groups.values())


def read_model(model: ModelLike, changes: Mapping[str, Any] | None = None, words: Sequence[str] = ()) -> ModelShapes:
    """The shapes behind a model.

    Args:
        model: see `ModelLike`.
        changes: values of the configuration to set before the model is built.
        words: of the command line that named the model.

    Raises:
        ValueError: on a name that would need the network, an unknown class, field, module or function, or no shape.
        TypeError: on something else than a `ModelLike`.
    """
    if isinstance(model, ModelShapes):
        return model
    if isinstance(model, (str, Path)):
        text = str(model)
        chosen = tuple(words) or (
            text,
            *(w for name, value in (changes or {}).items() for w in ("--set", f"{name}={value}")),
        )
        if _is_function(text):
            if changes:
                raise ValueError(f"preflight: --set changes configurations; {text!r} is a function, which takes none")
            return _of_module(_call(text), text, chosen)
        config = _configuration(text, dict(changes or {}))
        module = _from_config(config)
        label = f"{type(config).__name__} ({text})" if text != type(config).__name__ else text
        return _of_module(module, label, chosen, getattr(config.get_text_config(), "vocab_size", None))
    if isinstance(model, nn.Module):
        return _of_module(model, type(model).__name__, tuple(words))
    return _of_shapes(model, tuple(words))


def _of_module(module: nn.Module, label: str, words: tuple[str, ...], vocabulary: int | None = None) -> ModelShapes:
    units, groups, _ = group_parameters(module, None)
    if not groups:
        raise ValueError(f"preflight: {label} has no parameters")
    return ModelShapes(label, words, units, groups, module, vocabulary)


def _of_shapes(model: Any, words: tuple[str, ...]) -> ModelShapes:
    if not isinstance(model, (Mapping, Sequence)):
        raise TypeError(
            "preflight: expected the name of a configuration, module:function, an nn.Module or shapes, got a"
            f" {type(model).__name__}"
        )
    by_unit: Mapping[str, Any] = model if isinstance(model, Mapping) else {"block": model}
    groups: dict[str, Group] = {}
    for key, shapes in by_unit.items():
        sizes = [_size(key, shape) for shape in ([] if isinstance(shapes, str) else shapes)]
        if not sizes or any(min(size, default=0) < 1 for size in sizes):
            raise ValueError(f"preflight: unit {key!r} needs shapes of positive sizes, got {list(map(tuple, sizes))}")
        names = [f"{key}.{i}" for i in range(len(sizes))]
        entries = [
            Entry(name, s, torch.float32, True, key, i) for i, (name, s) in enumerate(zip(names, sizes, strict=True))
        ]
        groups[key] = Group(key, tuple(entries))
    units = [Unit(key, tuple((entry.name, entry) for entry in g.entries), (key,), False) for key, g in groups.items()]
    if not groups:
        raise ValueError("preflight: no shapes were given")
    return ModelShapes("shapes", words, tuple(units), groups, None)


def _size(key: str, shape: Any) -> torch.Size:
    if isinstance(shape, str) or not isinstance(shape, Sequence) or not all(isinstance(n, int) for n in shape):
        raise TypeError(
            f"preflight: a shape of unit {key!r} is {shape!r}; expected whole numbers, such as (1024, 768), and units as a"
            " list of shapes (the command line writes 1024x768)"
        )
    return torch.Size(shape)


# Names


def _is_function(text: str) -> bool:
    module, _, function = text.partition(":")
    return bool(function) and all(part.isidentifier() for part in (*module.split("."), function))


def _call(text: str) -> nn.Module:
    name, _, attribute = text.partition(":")
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(name), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(f"preflight: {text!r}: {error}; is its folder on PYTHONPATH?") from None
    except AttributeError:
        raise ValueError(f"preflight: module {name!r} has no {attribute!r}") from None
    with torch.device("meta"):
        module = function()
    if not isinstance(module, nn.Module):
        raise ValueError(f"preflight: {text} returned a {type(module).__name__}, expected an nn.Module")
    return module


def _configuration(text: str, changes: dict[str, Any]) -> Any:
    """A configuration of `transformers`, from a file or a class name, with some values changed."""
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"preflight: {text!r} needs transformers; install it: pip install 'mfsdp_func[preflight]'"
        ) from None
    if path.suffix == ".json" or path.is_file():
        if not path.is_file():
            raise ValueError(f"preflight: there is no file {path}")
        try:
            values = json.loads(path.read_text())
            kind = transformers.CONFIG_MAPPING[values["model_type"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"preflight: {path} is no configuration of transformers with a known model_type"
                f" ({type(error).__name__}: {error})"
            ) from None
        _check_fields(kind, changes, values)
        return kind.from_dict(values | changes)
    if "/" in text:
        raise ValueError(
            f"preflight: {text!r} is a name on a model hub, which needs the network; give its config.json as a file, or"
            " the class and its values, such as LlamaConfig --set num_hidden_layers=80"
        )
    kind = getattr(transformers, text, None) if text.isidentifier() else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PretrainedConfig)):
        raise ValueError(
            f"preflight: {text!r} is no file, no module:function, no shape, and no class of configurations in"
            f" transformers {transformers.__version__}; write for instance LlamaConfig"
        )
    _check_fields(kind, changes, {})
    return kind(**changes)


def _check_fields(kind: Any, changes: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Configurations take any name without a word: refuse those that no model would read."""
    known = {*vars(kind()), *kind.attribute_map, *values}
    for name in changes:
        if name not in known and not _is_read(kind, name):
            near = difflib.get_close_matches(name, known, 3)
            hint = f"; near to it are {', '.join(near)}" if near else ""
            raise ValueError(f"preflight: {kind.__name__} has no field {name!r}{hint}")


def _is_read(kind: Any, name: str) -> bool:
    """Whether the code of the model asks for a value that the class itself does not list."""
    file = Path(str(sys.modules[kind.__module__].__file__))
    code = file.with_name(file.name.replace("configuration_", "modeling_"))
    return code.is_file() and re.search(rf"config(\.|, [\"']){re.escape(name)}\b", code.read_text()) is not None


def _from_config(config: Any) -> nn.Module:
    """The model with its head on the meta device; the plain one where there is none."""
    from transformers import AutoModel, AutoModelForCausalLM

    with torch.device("meta"):
        try:
            module = AutoModelForCausalLM.from_config(config)
        except ValueError:
            module = AutoModel.from_config(config)
    return module
