from services.tokenizer.service import TokenizerService
from shared.process.service import main
from shared.settings.tokenizer import TokenizerConfig

if __name__ == "__main__":
    main("tokenizer", TokenizerConfig, TokenizerService)
