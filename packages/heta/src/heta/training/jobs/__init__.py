"""What the command line runs on ranks: training, prediction, comparison of strategies."""
