"""Runs: built from settings, trained, and kept in folders."""
