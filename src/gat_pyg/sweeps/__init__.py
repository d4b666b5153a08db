"""Many runs: seeds, tables and searches."""
