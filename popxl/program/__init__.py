"""A whole program in files, and as rules that another one reads."""
