"""Planning without devices: launch orders, ranges and their parts, fused groups, memory."""
