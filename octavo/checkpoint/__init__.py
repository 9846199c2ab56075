"""What a model consists of on disk: config, tokenizer, chat template, and where each tensor lies.

Torch-free. Start with `open_checkpoint` in `checkpoint.py`.
"""
