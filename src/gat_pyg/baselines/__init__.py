"""The methods that the paper compares itself with in Tables 2 and 3, one per file; none knows another."""
