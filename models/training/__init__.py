"""The making of `models/shoal-tiny`: data, tokenizer, model, training, evaluation and export."""
