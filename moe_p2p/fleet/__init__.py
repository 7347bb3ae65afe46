"""Who is there: names, incarnations, leases, and words between members through a store.

README.md says what its objects are, and what weights and kv use of it.
"""
