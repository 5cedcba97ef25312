"""Documents, passages, salient spans and questions; does not import torch."""
