"""Random programs: how seeds become graphs (`maker`), and what graphs mean in NumPy and in JAX (`meanings`)."""
