"""Planning without devices: operators, costs, the step of all ranks, allocation, and plans as files."""
