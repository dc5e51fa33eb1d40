"""The public test kit: what lmkv's own backends are tested with, for those who write one.

`backend_suite` needs pytest, `strategies` needs hypothesis; `clocks` and `faults` need neither. Import the
modules by name: nothing is re-exported, so that none of them drags in what another one needs.
"""
