"""Computes operators in the precision that a plan gives them; parameters stay float32."""
