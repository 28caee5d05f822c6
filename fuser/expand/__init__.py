"""Definitions of fused operators: each is put in the place of its operator, so that everything else applies to it."""
