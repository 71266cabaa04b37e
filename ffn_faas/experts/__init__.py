"""What F computes with: the model's experts, their bytes on disk, and the kernels that multiply them."""
