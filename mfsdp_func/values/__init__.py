"""Values: meshes, placements, layouts, owners. Integers only; no tensor, no process."""
