"""How `models/shoal-tiny` is made: data, tokenizer, model, training, evaluation and export."""
