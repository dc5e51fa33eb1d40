"""Backends that store chunks over a network, as values that processes on several machines share."""
