"""Backends over a network, which store chunks as values that other processes and machines share."""
