"""Planted bugs: small programs of a mesh, each with its bug and without, and what finds each.

`python -m tests.planted` runs all of them and writes BUGS.md, which `test_planted.py` holds against the run. To plant a
bug, add a `Bug` to the list `BUGS` of a module in this folder.
"""
