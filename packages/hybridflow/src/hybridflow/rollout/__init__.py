"""Generation of responses: sampling settings, and the engines that generate."""
