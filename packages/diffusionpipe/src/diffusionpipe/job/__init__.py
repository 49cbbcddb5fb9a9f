"""Describes a training job: a backbone cut into layers, frozen functions, inputs and a loss."""
