"""Helpers shared by test suites."""
