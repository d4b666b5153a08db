"""The methods that the paper compares with, a file each; none knows another."""
