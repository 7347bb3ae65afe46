"""Who is there: names, incarnations, leases, and words between members through a store.

README.md says what its objects are. weights stands on all of it, kv on its leases.
"""
