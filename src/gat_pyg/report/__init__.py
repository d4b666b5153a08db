"""What runs have left, set beside what the paper printed: tables, figures, pages."""
