"""Executables, programs and sessions in files."""
