"""Attention whose score needs the features of both ends: GATv2, and the scaled dot product."""
