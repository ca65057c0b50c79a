"""Saving a whole program to files and loading it, and export of its gradient rules."""
