"""The version of the project: its only definition."""

VERSION = "0.2.0"
