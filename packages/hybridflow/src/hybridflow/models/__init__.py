"""The models: decoders of the Llama family over any layout, with a vocabulary or a scalar on top."""
