"""How the demo model was made: its corpus, tokenizer, shape, training and evaluation."""
