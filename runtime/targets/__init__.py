"""Devices and compile targets."""
