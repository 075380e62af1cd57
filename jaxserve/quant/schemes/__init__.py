"""How Hugging Face checkpoints store quantized matrices: a file for each scheme, `registry.scheme_of` picks one."""
