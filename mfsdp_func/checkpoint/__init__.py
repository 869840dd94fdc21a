"""Checkpoints that cannot lie: whole or not at all, checked before they are believed, read by any number of ranks."""

from mfsdp_func.checkpoint.background import SaveHandle, save_async
from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.checkpoint.hf import import_hf
from mfsdp_func.checkpoint.hf_export import export_hf
from mfsdp_func.checkpoint.loading import load, spec_of
from mfsdp_func.checkpoint.looking import Difference, Inspection, diff, inspect, latest, verify
from mfsdp_func.checkpoint.saving import save
from mfsdp_func.checkpoint.shards import Shards

__all__ = [
    "CheckpointError",
    "Difference",
    "Inspection",
    "SaveHandle",
    "Shards",
    "diff",
    "export_hf",
    "import_hf",
    "inspect",
    "latest",
    "load",
    "save",
    "save_async",
    "spec_of",
    "verify",
]
