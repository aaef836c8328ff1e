"""The test suite.

It is a package so that `import tests.rank_pool` never finds an installed module.
"""
