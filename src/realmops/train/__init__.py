"""Training loops: inverse cloze task, REALM pre-training, Open-QA fine-tuning."""
