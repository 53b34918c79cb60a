"""Hugging Face transformers: `TrainingArguments`."""
