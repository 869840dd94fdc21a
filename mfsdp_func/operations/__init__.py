"""Operations on tensors: pure, over the one effect."""
