"""What a step takes on devices that are not there, from a model's configuration and data sheets."""
