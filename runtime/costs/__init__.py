"""Cost, memory and traffic of compiled programs, derived from XLA's output."""
