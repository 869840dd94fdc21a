"""The reference names everything that is public, as the docstrings have it now."""

import importlib

from tests.reference import NAMESPACES, README, lines_of, public_names, written


def test_the_reference_is_up_to_date() -> None:
    text = README.read_text()
    assert text == written(text), "run: python -m tests.reference"


def test_every_public_name_says_what_it_is() -> None:
    for namespace in NAMESPACES:
        for _, line in lines_of(namespace):
            sentence = line.split("|")[2].strip()
            assert len(sentence) > 10, f"{namespace}: {line} needs a docstring whose first sentence says what it is"


def test_a_module_without_a_list_gives_its_own_functions() -> None:
    assert {"gather", "scatter"} <= set(public_names(importlib.import_module("mfsdp_func.inplace")))
    assert "launch" not in public_names(importlib.import_module("mfsdp_func.inplace"))
