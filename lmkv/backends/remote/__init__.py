"""Backends over a network: chunks as values of stores shared with other processes and machines."""
