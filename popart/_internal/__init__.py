"""Private names of `popart` that published programs use, each in a module of its original path."""
