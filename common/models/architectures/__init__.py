"""Networks with their real weight shapes, most of them from torchvision, timm and transformers."""
