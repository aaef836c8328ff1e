"""The tests; a package, so that `import tests.rank_pool` means this folder and nothing installed
elsewhere.
"""
