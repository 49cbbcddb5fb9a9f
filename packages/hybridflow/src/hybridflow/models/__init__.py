"""The models: decoders of the Llama family in any layout, with a vocabulary or a scalar head."""
