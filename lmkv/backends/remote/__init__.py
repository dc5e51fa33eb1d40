"""Backends over a network: chunks as values of stores that other processes and machines use, too."""
