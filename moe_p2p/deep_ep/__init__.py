"""DeepEP's Python API over AllToAll.

    import moe_p2p.deep_ep as deep_ep            # change the import, or change none:
    moe_p2p.deep_ep.install()                    # from now on `import deep_ep` gives this package

install.py has more ways to change none.
"""
