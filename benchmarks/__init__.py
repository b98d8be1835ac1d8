"""Measurements anybody can repeat: each prints what it ran on, ratios are taken within one run."""
