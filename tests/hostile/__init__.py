"""Hostile callers: bad values, mutated requests, attacks; and what `docs/security.md` promises.

`bad_inputs.py` is the table of what must be refused, `mutations.py` makes new requests from good
ones, `test_security*.py` are the attacks. Not for: faults of the machine (`tests/e2e`).
"""
