"""Measurements, one command each; results that name their machine stand in `results/`."""
