"""What is recorded in a layer's forward, and how its backward gets what autograd saved."""
