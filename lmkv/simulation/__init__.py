"""Replays request traces over the policies and admissions that are shipped, beside the optimum."""
