"""Making responses: the sampler's settings, and the engines that generate."""
