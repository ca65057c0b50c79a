"""Random programs: from seeds to graphs (`maker`), what graphs mean in NumPy and in JAX (`meanings`), ways to run them
(`settings`), and whether they agree (`agreement`).

    python -m tests.popxl.random_programs

runs a long series of them.
"""
