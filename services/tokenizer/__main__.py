from services.tokenizer.service import TokenizerService
from shared.config.tokenizer import TokenizerConfig
from shared.service import main

if __name__ == "__main__":
    main("tokenizer", TokenizerConfig, TokenizerService)
