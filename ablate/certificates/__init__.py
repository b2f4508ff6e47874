"""Certificates: what the gradient of each loss variant is, on problems small enough to enumerate."""
