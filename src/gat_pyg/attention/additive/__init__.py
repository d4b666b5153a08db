"""Attention with additive scores: LeakyReLU(s_j + d_i + u_ij), or constant ones."""
