"""Compiled programs, their device state, and their execution."""
