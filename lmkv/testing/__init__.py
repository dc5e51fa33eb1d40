"""Test helpers for authors of backends: a suite, hypothesis strategies, fault injection, a manual clock.

`backend_suite` needs pytest, `strategies` needs hypothesis; the others need neither. Import the modules by name: this
package imports none of them.
"""
