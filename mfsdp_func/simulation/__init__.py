"""A mesh of simulated ranks in one process; see README.md beside this file."""
