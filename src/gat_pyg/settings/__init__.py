"""The settings of a run, from the command's configuration."""
