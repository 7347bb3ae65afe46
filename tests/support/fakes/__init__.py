"""Modules with DeepEP's calls that go wrong, for tests of the benchmark."""
