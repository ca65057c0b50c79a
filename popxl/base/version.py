"""The version of the project: the only place that says it."""

VERSION = "0.2.0"
