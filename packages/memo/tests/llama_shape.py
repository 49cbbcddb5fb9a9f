"""A Llama of round numbers, whose steps are simulated."""

H, F, LAYERS, VOCABULARY = 128, 352, 12, 32_000
SHAPE = {
    "hidden_size": H, "intermediate_size": F, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY,
}  # fmt: skip
